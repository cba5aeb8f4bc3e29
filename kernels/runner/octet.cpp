// The C API over Model: statuses for exceptions, and each error's words kept for its thread.
#include "octet.h"

#include <algorithm>
#include <memory>
#include <new>

#include "core/cpu/isa.h"
#include "core/cpu/memory.h"
#include "core/cpu/of_thread.h"
#include "file_bytes.h"
#include "model.h"
#include "thread_limit.h"

struct octet_model {
  octet_model(octet::Artefact artefact, std::shared_ptr<const void> bytes) : model(std::move(artefact), std::move(bytes)) {}
  octet::Model model;
};

namespace {

using namespace octet;

// What the last call of this thread that failed said.
thread_local const char* said = "";

octet_status failed(octet_status status, const char* why) {
  try {
    thread_local std::string* own = nullptr;
    std::string& words = of_thread(own);
    words = why;
    said = words.c_str();
  } catch (const std::bad_alloc&) {
    said = "out of memory";
  }
  return status;
}

// No exception may reach a caller in C. `bad` is the status of what is wrong with what the caller gave.
template <class Fn>
octet_status guarded(octet_status bad, Fn fn) {
  try {
    return fn();
  } catch (const std::bad_alloc& error) {
    return failed(OCTET_NO_MEMORY, words_of(error));
  } catch (const std::length_error&) {  // what the standard library says of a size beyond all memory
    return failed(OCTET_NO_MEMORY, "out of memory");
  } catch (const std::invalid_argument& error) {
    return failed(bad, error.what());
  } catch (const std::exception& error) {
    return failed(OCTET_FAILED, error.what());
  } catch (...) {
    return failed(OCTET_FAILED, "an unknown error");
  }
}

octet_model* opened(std::shared_ptr<const FileBytes> file, const std::string& name) {
  Artefact artefact = read_artefact(file->data(), file->size(), name);
  try {
    return new octet_model(std::move(artefact), std::move(file));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + ": " + error.what());
  }
}

octet_dtype dtype_of(const ModelValue& value) {
  return value.dtype == "float32" ? OCTET_FLOAT32 : value.dtype == "bool" ? OCTET_BOOL : value.dtype == "int64" ? OCTET_INT64 : OCTET_UINT8;
}

octet_status describe(const std::vector<ModelValue>& values, int32_t index, octet_value* out) {
  if (index < 0 || index >= static_cast<int32_t>(values.size()) || !out)
    return failed(OCTET_BAD_INPUT, "there is no such input or output, or no place for its description");
  const ModelValue& value = values[index];
  *out = {value.name.c_str(), dtype_of(value), value.has_shape ? static_cast<int32_t>(value.sizes.size()) : -1, value.fixed_rank, {}};
  std::copy(value.sizes.begin(), value.sizes.end(), out->sizes);
  return OCTET_OK;
}

size_t alignment_of(octet_dtype dtype) {
  return dtype == OCTET_FLOAT32 ? alignof(float) : dtype == OCTET_INT64 ? alignof(int64_t) : 1;
}

void check_data(const std::vector<ModelValue>& values, const octet_tensor* tensors, const char* what) {
  for (size_t i = 0; i < values.size(); ++i)
    if (!tensors[i].data || reinterpret_cast<uintptr_t>(tensors[i].data) % alignment_of(dtype_of(values[i])))
      throw BadInput(std::string(what) + " '" + values[i].name + "' has no data, or data that is not aligned to its elements");
}

void check_given(const octet_model* model, const octet_tensor* inputs, const octet_tensor* outputs) {
  if (!model || (!inputs && !model->model.inputs().empty()) || !outputs) throw BadInput("the model, the inputs or the outputs are NULL");
}

}  // namespace

extern "C" {

octet_model* octet_open(const char* path) {
  octet_model* model = nullptr;
  guarded(OCTET_BAD_FILE, [&] {
    if (!path) throw std::invalid_argument("octet_open: path is NULL");
    model = opened(std::make_shared<FileBytes>(path), path);
    return OCTET_OK;
  });
  return model;
}

octet_model* octet_open_memory(const void* bytes, size_t size) {
  octet_model* model = nullptr;
  guarded(OCTET_BAD_FILE, [&] {
    if (!bytes) throw std::invalid_argument("octet_open_memory: bytes is NULL");
    model = opened(std::make_shared<FileBytes>(bytes, size), "the file in memory");
    return OCTET_OK;
  });
  return model;
}

void octet_close(octet_model* model) { delete model; }

int32_t octet_input_count(const octet_model* model) { return model ? static_cast<int32_t>(model->model.inputs().size()) : 0; }
int32_t octet_output_count(const octet_model* model) { return model ? static_cast<int32_t>(model->model.outputs().size()) : 0; }

octet_status octet_describe_input(const octet_model* model, int32_t index, octet_value* value) {
  return model ? describe(model->model.inputs(), index, value) : failed(OCTET_BAD_INPUT, "the model is NULL");
}

octet_status octet_describe_output(const octet_model* model, int32_t index, octet_value* value) {
  return model ? describe(model->model.outputs(), index, value) : failed(OCTET_BAD_INPUT, "the model is NULL");
}

octet_status octet_set_threads(octet_model* model, int32_t threads) {
  constexpr int32_t kMostThreads = 1024;
  if (!model || threads < 0 || threads > kMostThreads)
    return failed(OCTET_BAD_INPUT, "the model is NULL, or the number of threads is not in 0 to 1024");
  model->model.threads = threads;
  return OCTET_OK;
}

octet_status octet_plan(octet_model* model, const octet_tensor* inputs, octet_tensor* outputs) {
  return guarded(OCTET_BAD_INPUT, [&] {
    check_given(model, inputs, outputs);
    const ThreadLimit limit(model->model.threads);
    const std::shared_ptr<const Plan> plan = model->model.plan(inputs);
    for (size_t i = 0; i < plan->outputs().size(); ++i) {
      const PlanTensor& one = plan->outputs()[i];
      outputs[i].dtype = one.real ? OCTET_FLOAT32 : OCTET_UINT8, outputs[i].rank = static_cast<int32_t>(one.sizes.size());
      std::copy(one.sizes.begin(), one.sizes.end(), outputs[i].sizes);
      std::copy(one.strides.begin(), one.strides.end(), outputs[i].strides);
    }
    return OCTET_OK;
  });
}

octet_status octet_run(octet_model* model, const octet_tensor* inputs, octet_tensor* outputs) {
  return guarded(OCTET_BAD_INPUT, [&] {
    check_given(model, inputs, outputs);
    const ThreadLimit limit(model->model.threads);
    const std::shared_ptr<const Plan> plan = model->model.plan(inputs);
    check_data(model->model.inputs(), inputs, "input");
    check_data(model->model.outputs(), outputs, "output");
    std::vector<const void*> from;
    std::vector<void*> to;
    for (size_t i = 0; i < model->model.inputs().size(); ++i) from.push_back(inputs[i].data);
    for (size_t i = 0; i < plan->outputs().size(); ++i) to.push_back(outputs[i].data);
    if (model->model.run(*plan, from.data(), to.data())) return OCTET_OK;
    return failed(OCTET_NOT_FINITE, "NaN or inf came to where a value is rounded to an integer; the outputs hold nothing");
  });
}

const char* octet_error(void) { return said; }

const char* octet_instruction_set(void) { return isa_name(isa()); }

int32_t octet_file_version(void) { return static_cast<int32_t>(kFileVersion); }

}  // extern "C"
