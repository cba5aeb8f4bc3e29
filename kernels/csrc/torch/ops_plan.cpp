// The operator run_plan: looks up or builds the plan of a text for these constants and shapes, and runs it.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/hash.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>

#include "core/plan/prepared.h"
#include "torch/at_fork.h"
#include "torch/errors.h"
#include "torch/operands.h"
#include "torch/packed.h"

namespace octet {
namespace {

using at::Tensor;

// Plans are kept while they hold no more bytes than this, the one added last aside; all plans of a model share their packed
// weights (packed.h). A transformer of 24 blocks has 2,000 operations in 150 plans, of a kilobyte each in the mean, for every
// length that comes.
constexpr int64_t kMostBytes = int64_t{1} << 26;

struct ConstantKey {
  // A weak reference keeps the StorageImpl's address from being reused.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const c10::StorageImpl* address;
  const void* data;
  uint32_t version;
  // Of two views that begin at the same place, these differ.
  at::ScalarType type;
  std::vector<int64_t> sizes, strides;
  bool is(const Tensor& tensor) const {
    return address == tensor.storage().unsafeGetStorageImpl() && data == tensor.const_data_ptr() &&
           version == version_of(tensor) && tensor.scalar_type() == type && tensor.sizes() == sizes &&
           tensor.strides() == strides;
  }
};

at::ScalarType type_of(const PlanTensor& tensor) {
  return tensor.real ? at::kFloat : tensor.index ? at::kLong : at::kByte;
}

// A text with its constants, prepared for any shapes: the common part of plans for several shapes.
struct Prepared {
  std::string text, backend;
  std::vector<ConstantKey> constants;
  std::optional<PreparedProgram> program;

  bool fits(c10::string_view given, c10::string_view library, at::TensorList with) const {
    if (backend != library || text != given || constants.size() != with.size()) return false;
    for (size_t i = 0; i < with.size(); ++i)
      if (!constants[i].is(with[i])) return false;
    return true;
  }
  bool expired() const {
    return std::any_of(constants.begin(), constants.end(), [](const ConstantKey& key) { return key.storage.expired(); });
  }
};

struct KnownPlan {
  std::shared_ptr<const Prepared> prepared;
  std::vector<PlanTensor> inputs;
  std::shared_ptr<const Plan> plan;
  size_t operations = 0;
  mutable std::atomic<uint64_t> used{0};

  bool fits(c10::string_view text, c10::string_view library, at::TensorList given, at::TensorList with) const {
    if (inputs.size() != given.size()) return false;
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].sizes() != inputs[i].sizes || given[i].strides() != inputs[i].strides ||
          given[i].scalar_type() != type_of(inputs[i]))
        return false;
    return prepared->fits(text, library, with);
  }
};

struct PlanCache {
  ForkedMutex mutex;
  std::atomic<uint64_t> clock{0};
  std::unordered_multimap<size_t, std::shared_ptr<const KnownPlan>> entries;
  int64_t bytes = 0;  // of all entries

  auto drop(decltype(entries)::const_iterator entry) {
    bytes -= entry->second->plan->bytes();
    return entries.erase(entry);
  }
  // Drops plans whose constants are gone, and those used longest ago, until there is room for so many bytes.
  void make_room(int64_t wanted) {
    for (auto it = entries.cbegin(); it != entries.cend();)
      it = it->second->prepared->expired() ? drop(it) : std::next(it);
    while (!entries.empty() && bytes + wanted > kMostBytes)
      drop(std::min_element(entries.cbegin(), entries.cend(),
                            [](const auto& a, const auto& b) { return a.second->used < b.second->used; }));
  }
};

PlanCache& plan_cache() {
  static PlanCache* const instance = new PlanCache;  // never destroyed: threads may outlive static destructors
  return *instance;
}

size_t hash_of(c10::string_view program, at::TensorList inputs, at::TensorList constants) {
  size_t hash = std::hash<c10::string_view>()(program);
  for (const Tensor& input : inputs)
    for (const int64_t size : input.sizes()) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  for (const Tensor& constant : constants.slice(0, std::min<size_t>(constants.size(), 4)))
    hash = c10::hash_combine(hash, reinterpret_cast<size_t>(constant.const_data_ptr()));
  return hash;
}

// The packed forms of a call's constants, from the cache of packed weights (packed.h).
class KeptWeights final : public WeightPacker {
 public:
  KeptWeights(at::TensorList constants, c10::string_view backend) : constants_(constants), backend_(backend) {}
  std::shared_ptr<const PackedGemm> gemm(int constant, int64_t group, int64_t groups) override {
    const Tensor& weight = constants_[constant];
    return groups ? packed_conv(weight, group, groups, backend_) : packed(weight, backend_);
  }
  std::shared_ptr<const PackedGemm> grouped(int constant, int scales) override {
    return packed_weight(constants_[constant], constants_[scales], "scale", backend_).gemm;
  }
  std::shared_ptr<const PackedDepthwise> depthwise(int constant) override { return packed_depthwise(constants_[constant]); }
  std::shared_ptr<const PackedWinograd> winograd(int constant) override {
    return packed_winograd(constants_[constant], backend_);
  }
  // Not held: a plan is kept no longer than its constants, which every call of it brings.
  std::shared_ptr<const void> table(int constant) override {
    const Tensor& table = constants_[constant];
    if (table.is_contiguous()) return {std::shared_ptr<const void>(), table.const_data_ptr()};
    const auto copy = std::make_shared<const Tensor>(table.contiguous());
    return {copy, copy->const_data_ptr()};
  }

 private:
  at::TensorList constants_;
  c10::string_view backend_;
};

const char* name_of(at::ScalarType type) {
  return type == at::kChar  ? "int8"
         : type == at::kByte ? "uint8"
         : type == at::kInt  ? "int32"
         : type == at::kHalf ? "float16"
                             : "float32";
}

std::shared_ptr<const Prepared> prepare(at::TensorList constants, c10::string_view text, c10::string_view backend) {
  auto prepared = std::make_shared<Prepared>();
  prepared->text = std::string(text), prepared->backend = std::string(backend);
  std::vector<Tensor> contiguous;
  std::vector<PlanConstant> described;
  for (const Tensor& constant : constants) {
    const at::ScalarType type = constant.scalar_type();
    TORCH_CHECK_TYPE(constant.is_cpu() && (type == at::kChar || type == at::kByte || type == at::kInt || type == at::kHalf ||
                                           type == at::kFloat),
                     "run_plan: a constant is ", type, ", expected Char, Byte, Int, Half or Float on the CPU");
    contiguous.push_back(constant.contiguous());
    prepared->constants.push_back({constant.storage().getWeakStorageImpl(), constant.storage().unsafeGetStorageImpl(),
                                   constant.const_data_ptr(), version_of(constant), type, constant.sizes().vec(),
                                   constant.strides().vec()});
    described.push_back({contiguous.back().const_data_ptr(), name_of(constant.scalar_type()), constant.sizes().vec()});
  }
  prepared->program.emplace(translated("run_plan: ", [&] { return PreparedProgram(text, described); }));
  return prepared;
}

std::shared_ptr<KnownPlan> make_plan(std::shared_ptr<const Prepared> prepared, at::TensorList inputs, at::TensorList constants) {
  auto entry = std::make_shared<KnownPlan>();
  for (const Tensor& input : inputs) {
    const at::ScalarType type = input.scalar_type();
    TORCH_CHECK_TYPE(input.is_cpu() && (type == at::kByte || type == at::kFloat || type == at::kLong), "run_plan: an input is ",
                     type, " on ", input.device(), ", expected Float, Byte or Long on the CPU");
    entry->inputs.push_back({input.sizes().vec(), input.strides().vec(), type == at::kFloat, type == at::kLong});
  }
  KeptWeights weights(constants, prepared->backend);
  entry->plan = translated("run_plan: ", [&] { return prepared->program->build(entry->inputs, weights); });
  entry->operations = prepared->program->program().operations.size();
  entry->prepared = std::move(prepared);
  return entry;
}

std::shared_ptr<const KnownPlan> find_or_build(at::TensorList inputs, at::TensorList constants, c10::string_view program,
                                          c10::string_view backend) {
  const size_t hash = hash_of(program, inputs, constants);
  PlanCache& known = plan_cache();
  std::shared_ptr<const Prepared> prepared;
  {
    std::shared_lock lock(known.mutex);
    const auto [begin, end] = known.entries.equal_range(hash);
    for (auto it = begin; it != end; ++it)
      if (it->second->fits(program, backend, inputs, constants)) {
        it->second->used = ++known.clock;
        return it->second;
      }
    // Other shapes are prepared already.
    for (auto it = known.entries.begin(); it != known.entries.end() && !prepared; ++it)
      if (it->second->prepared->fits(program, backend, constants)) prepared = it->second->prepared;
  }
  if (!prepared) prepared = prepare(constants, program, backend);
  const std::shared_ptr<KnownPlan> made = make_plan(std::move(prepared), inputs, constants);
  made->used = ++known.clock;
  std::unique_lock lock(known.mutex);
  known.make_room(made->plan->bytes());
  known.entries.emplace(hash, made);
  known.bytes += made->plan->bytes();  // behind what may find no memory
  return made;
}

struct Outcome {
  std::vector<Tensor> outputs;
  bool finite;
};

// Runs the plan; with `nanoseconds` adds the time of each operation.
Outcome run(const Plan& plan, at::TensorList inputs, std::vector<int64_t>* nanoseconds = nullptr) {
  std::vector<Tensor> outputs;
  c10::SmallVector<const void*, 8> from;
  c10::SmallVector<void*, 8> to;
  for (const PlanTensor& output : plan.outputs()) {
    outputs.push_back(at::detail::empty_strided_cpu(output.sizes, output.strides, output.real ? at::kFloat : at::kByte));
    to.push_back(outputs.back().mutable_data_ptr());
  }
  for (const Tensor& input : inputs) from.push_back(input.const_data_ptr());
  const bool finite = translated("run_plan: ", [&] {
    return nanoseconds ? plan.run_timed(from.data(), to.data(), *nanoseconds) : plan.run(from.data(), to.data());
  });
  return {std::move(outputs), finite};
}

std::vector<Tensor> run_plan_op(at::TensorList inputs, at::TensorList constants, c10::string_view program,
                                c10::string_view backend) {
  return run(*find_or_build(inputs, constants, program, backend)->plan, inputs).outputs;
}

// Nothing where a value to be quantised is NaN or inf.
std::vector<Tensor> outputs_of_finite(Outcome outcome) {
  return outcome.finite ? std::move(outcome.outputs) : std::vector<Tensor>{};
}

std::vector<Tensor> run_plan_of_finite_op(at::TensorList inputs, at::TensorList constants, c10::string_view program,
                                          c10::string_view backend) {
  return outputs_of_finite(run(*find_or_build(inputs, constants, program, backend)->plan, inputs));
}

// A text with its constants that Python has given once and calls by number: to hand them over anew costs a microsecond, and a
// tenth more for each constant. What was checked at each call is so still: that each constant is as the plan was built from it.
struct Text {
  std::string program, backend;
  std::vector<Tensor> constants;
};

struct Texts {
  ForkedMutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Text>> by_number;
  int64_t next = 0;
};

Texts& texts() {
  static Texts* const instance = new Texts;
  return *instance;
}

int64_t keep_text(at::TensorList constants, c10::string_view program, c10::string_view backend) {
  auto text = std::make_shared<Text>();
  text->program = std::string(program), text->backend = std::string(backend), text->constants = constants.vec();
  const std::unique_lock lock(texts().mutex);
  texts().by_number.emplace(texts().next, std::move(text));
  return texts().next++;
}

void drop_text(int64_t number) {
  std::shared_ptr<Text> dropped;  // its constants go when nobody waits
  const std::unique_lock lock(texts().mutex);
  const auto at = texts().by_number.find(number);
  if (at == texts().by_number.end()) return;
  dropped = std::move(at->second);
  texts().by_number.erase(at);
}

int64_t text_count() {
  const std::shared_lock lock(texts().mutex);
  return static_cast<int64_t>(texts().by_number.size());
}

// Whether kernels may read it: no tensor of another device or layout, and none that stands for another.
bool is_plain(const Tensor& input) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain({Key::CPU, Key::AutogradCPU, Key::ADInplaceOrView, Key::AutocastCPU});
  // The difference keeps what says which backend it is.
  return input.is_cpu() && ((input.key_set() - kPlain).raw_repr() & ~c10::full_backend_mask) == 0;
}

std::shared_ptr<Text> text_of(int64_t number) {
  const std::shared_lock lock(texts().mutex);
  const auto at = texts().by_number.find(number);
  TORCH_CHECK_VALUE(at != texts().by_number.end(), "run_text: no text has number ", number);
  return at->second;
}

// As run_plan_of_finite.
std::vector<Tensor> run_text(at::TensorList inputs, int64_t number) {
  const std::shared_ptr<Text> text = text_of(number);
  static const auto by_dispatcher = c10::Dispatcher::singleton()
                                        .findSchemaOrThrow("octet::run_plan_of_finite", "")
                                        .typed<decltype(run_plan_of_finite_op)>();
  return by_dispatcher.call(inputs, text->constants, text->program, text->backend);
}

// As run_text, of plain tensors; and the nanoseconds of each line of the text that is an operation.
std::tuple<std::vector<Tensor>, std::vector<int64_t>> time_text(at::TensorList inputs, int64_t number) {
  TORCH_CHECK_TYPE(std::all_of(inputs.begin(), inputs.end(), is_plain), "time_text: an input is no plain tensor on the CPU");
  const std::shared_ptr<Text> text = text_of(number);
  const std::shared_ptr<const KnownPlan> entry = find_or_build(inputs, text->constants, text->program, text->backend);
  std::vector<int64_t> nanoseconds(entry->operations, 0);
  std::vector<Tensor> outputs = outputs_of_finite(run(*entry->plan, inputs, &nanoseconds));
  return {std::move(outputs), std::move(nanoseconds)};
}

// Those of dead constants are dropped first.
int64_t plan_count() {
  PlanCache& known = plan_cache();
  std::unique_lock lock(known.mutex);
  known.make_room(0);
  return static_cast<int64_t>(known.entries.size());
}

int64_t plan_bytes() {
  PlanCache& known = plan_cache();
  std::shared_lock lock(known.mutex);
  return known.bytes;
}

}  // namespace

TORCH_LIBRARY_IMPL(octet, CPU, m) {
  m.impl("run_plan", &Defined<&run_plan_op>::call);
  m.impl("run_plan_of_finite", &Defined<&run_plan_of_finite_op>::call);
}

TORCH_LIBRARY_FRAGMENT(octet_native, m) {
  m.def("plan_count() -> int", &plan_count);
  m.def("plan_bytes() -> int", &plan_bytes);
  m.def("text_count() -> int", &text_count);
  m.def("keep_text(Tensor[] constants, str program, str backend) -> int", &Defined<&keep_text>::call);
  m.def("drop_text(int number) -> ()", &drop_text);
  m.def("run_text(Tensor[] inputs, int number) -> Tensor[]", &run_text);
  m.def("time_text(Tensor[] inputs, int number) -> (Tensor[], int[])", &time_text);
}

}  // namespace octet
