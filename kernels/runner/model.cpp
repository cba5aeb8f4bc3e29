#include "model.h"

#include <algorithm>
#include <mutex>

#include "core/plan/text.h"

namespace octet {
namespace {

// Of one model, the plan added last aside.
constexpr size_t kMostPlans = 64;
constexpr int64_t kMostBytes = int64_t{1} << 26;

const char* name_of(octet_dtype dtype) {
  switch (dtype) {
    case OCTET_FLOAT32:
      return "float32";
    case OCTET_UINT8:
      return "uint8";
    case OCTET_BOOL:
      return "bool";
    case OCTET_INT64:
      return "int64";
    case OCTET_DTYPE_OTHER:
      break;
  }
  return "of no known type";
}

PlanTensor described(const octet_tensor& tensor) {
  return {{tensor.sizes, tensor.sizes + tensor.rank}, {tensor.strides, tensor.strides + tensor.rank}, tensor.dtype == OCTET_FLOAT32,
          tensor.dtype == OCTET_INT64};
}

bool fits(const PlanTensor& known, const octet_tensor& given) {
  return known.real == (given.dtype == OCTET_FLOAT32) && known.index == (given.dtype == OCTET_INT64) &&
         std::equal(known.sizes.begin(), known.sizes.end(), given.sizes, given.sizes + given.rank) &&
         std::equal(known.strides.begin(), known.strides.end(), given.strides, given.strides + given.rank);
}

// The last byte of a tensor, counted from its first, is within 2**40.
bool has_possible_extent(const octet_tensor& tensor) {
  constexpr int64_t kMost = int64_t{1} << 40;
  int64_t count = 1, last = 0;
  for (int d = 0; d < tensor.rank; ++d) {
    const int64_t size = tensor.sizes[d], stride = tensor.strides[d];
    if (size < 0 || stride < 0 || (size > 0 && count > kMost / size)) return false;
    if (size > 1 && stride > kMost / size) return false;
    count *= size, last += std::max<int64_t>(size - 1, 0) * stride;
    if (last > kMost) return false;
  }
  return true;
}

// How an input differs from what it was at export, where it does in more than sizes that are free; else empty.
std::string unlike_export(const octet_tensor& given, const ModelValue& value) {
  const Sizes sizes(given.sizes, given.sizes + given.rank);
  const bool same = std::equal(sizes.begin(), sizes.end(), value.sizes.begin(), value.sizes.end(),
                               [](int64_t size, int64_t known) { return known < 0 || size == known; });
  return same || !value.has_shape ? "" : "; input '" + value.name + "' is " + shown(sizes) + ", at export it was " + shown(value.sizes);
}

std::string start_of(std::string_view line) { return std::string(line.substr(0, line.find(" = ") + 3)); }

}  // namespace

Model::Model(Artefact artefact, std::shared_ptr<const void> bytes)
    : bytes_(std::move(bytes)),
      inputs_(std::move(artefact.inputs)),
      outputs_(std::move(artefact.outputs)),
      steps_(std::move(artefact.steps)) {
  const std::vector<std::string_view> lines = split(artefact.plan, '\n');
  for (size_t i = 2; i + 1 < lines.size(); ++i) lines_.push_back(start_of(lines[i]));
  if (steps_.size() != lines_.size())
    throw std::invalid_argument("there are " + std::to_string(steps_.size()) + " names for " + std::to_string(lines_.size()) +
                                " operations");
  try {
    program_.emplace(artefact.plan, artefact.constants);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(with_step(error.what()));
  }
  const size_t inputs = program_->program().inputs, outputs = program_->program().outputs.size();
  if (inputs != inputs_.size() || outputs != outputs_.size())
    throw std::invalid_argument("its plan has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) +
                                " outputs, expected " + std::to_string(inputs_.size()) + " and " + std::to_string(outputs_.size()));
  weights_.emplace(artefact.constants);
}

// The name of the layer in front of an error that quotes a line of the plan.
std::string Model::with_step(const std::string& error) const {
  constexpr std::string_view kBegin = "plan line '";
  if (!error.starts_with(kBegin)) return error;
  const std::string_view line = std::string_view(error).substr(kBegin.size());
  for (size_t i = 0; i < lines_.size(); ++i)
    if (line.starts_with(lines_[i])) return "layer '" + steps_[i] + "': " + error;
  return error;
}

void Model::check(const octet_tensor& input, const ModelValue& expected) const {
  const std::string what = "input '" + expected.name + "'";
  if (name_of(input.dtype) != expected.dtype)
    throw BadInput(what + " is " + name_of(input.dtype) + ", expected " + expected.dtype);
  if (input.rank < 0 || input.rank > OCTET_MOST_DIMENSIONS ||
      (expected.fixed_rank && input.rank != static_cast<int32_t>(expected.sizes.size())))
    throw BadInput(what + " has " + std::to_string(input.rank) + " dimensions, expected " +
                   (expected.fixed_rank ? std::to_string(expected.sizes.size()) : "0 to " + std::to_string(OCTET_MOST_DIMENSIONS)));
  if (!has_possible_extent(input)) throw BadInput(what + " has impossible sizes or strides");
}

std::shared_ptr<const Plan> Model::plan(const octet_tensor* inputs) {
  if (std::shared_ptr<const Plan> known = find(inputs)) return known;
  for (size_t i = 0; i < inputs_.size(); ++i) check(inputs[i], inputs_[i]);
  return build(inputs);
}

bool Model::run(const Plan& plan, const void* const* inputs, void* const* outputs) const {
  try {
    return plan.run(inputs, outputs);
  } catch (const std::out_of_range& error) {
    throw BadInput(with_step(error.what()));
  }
}

std::shared_ptr<const Plan> Model::find(const octet_tensor* inputs) {
  const std::shared_lock lock(mutex_);
  for (const std::unique_ptr<Entry>& entry : entries_) {
    bool same = true;
    for (size_t i = 0; i < inputs_.size() && same; ++i)
      // The rank first: what is not checked yet may say any.
      same = inputs[i].rank == static_cast<int32_t>(entry->inputs[i].sizes.size()) && fits(entry->inputs[i], inputs[i]) &&
             name_of(inputs[i].dtype) == inputs_[i].dtype;
    if (!same) continue;
    entry->used = ++clock_;
    return entry->plan;
  }
  return nullptr;
}

std::shared_ptr<const Plan> Model::build(const octet_tensor* inputs) {
  auto entry = std::make_unique<Entry>();
  for (size_t i = 0; i < inputs_.size(); ++i) entry->inputs.push_back(described(inputs[i]));
  try {
    entry->plan = program_->build(entry->inputs, *weights_);
  } catch (const std::invalid_argument& error) {
    std::string what = with_step(error.what());
    for (size_t i = 0; i < inputs_.size(); ++i) what += unlike_export(inputs[i], inputs_[i]);
    throw BadInput(what);
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const PlanTensor& output = entry->plan->outputs()[i];
    const std::string& declared = outputs_[i].dtype;
    if (output.real != (declared == "float32") || output.index != (declared == "int64"))
      throw BadInput("output '" + outputs_[i].name + "' is " + (output.real ? "float32" : output.index ? "int64" : "uint8") +
                     ", and the file says " + declared);
    if (output.sizes.size() > OCTET_MOST_DIMENSIONS)
      throw BadInput("output '" + outputs_[i].name + "' would have " + std::to_string(output.sizes.size()) + " dimensions");
  }
  entry->used = ++clock_;
  std::shared_ptr<const Plan> plan = entry->plan;
  const std::unique_lock lock(mutex_);
  while (!entries_.empty() && (entries_.size() >= kMostPlans || bytes_of_plans_ + plan->bytes() > kMostBytes)) {
    const auto oldest = std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) { return a->used < b->used; });
    bytes_of_plans_ -= (*oldest)->plan->bytes();
    entries_.erase(oldest);
  }
  bytes_of_plans_ += plan->bytes();
  entries_.push_back(std::move(entry));
  return plan;
}

}  // namespace octet
