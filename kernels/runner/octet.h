/* Runs a quantised model without Python and torch: the files that `quant.save(model, path, runner=True)` writes.
 *
 *     octet_model* model = octet_open("model.q8");
 *     octet_plan(model, inputs, outputs);   sizes of the outputs for inputs of these sizes
 *     octet_run(model, inputs, outputs);    in memory of the caller
 *     octet_close(model);
 *
 * Any number of threads may use one model at once. What goes wrong is a status, and octet_error() says in words what and where.
 * A process may fork when no thread is in a call of this library, and its child then use the same models: where the thread that
 * forks had shared work with others, on one thread (OpenMP), or on new ones (a pool of our own).
 */
#ifndef OCTET_H
#define OCTET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define OCTET_API __declspec(dllexport)
#else
#define OCTET_API __attribute__((visibility("default")))
#endif

enum { OCTET_MOST_DIMENSIONS = 8 };

typedef enum octet_dtype {
  OCTET_FLOAT32 = 0,
  OCTET_UINT8 = 1,
  OCTET_BOOL = 2,
  OCTET_INT64 = 3,
  OCTET_DTYPE_OTHER = -2147483647 - 1 /* no dtype: with it every int is a value of the type, so that a wrong one can be refused */
} octet_dtype;

typedef enum octet_status {
  OCTET_OK = 0,
  OCTET_BAD_FILE = 1,   /* it cannot be read, is damaged, of a newer version, or not for the runner */
  OCTET_BAD_INPUT = 2,  /* an input has a dtype, rank, size or stride that the model does not take, or an index of no row */
  OCTET_NOT_FINITE = 3, /* NaN or inf came to where a value is rounded to an integer; the outputs hold nothing */
  OCTET_NO_MEMORY = 4,
  OCTET_FAILED = 5 /* anything else */
} octet_status;

typedef struct octet_model octet_model;

/* What is checked of every call: that the model, the arrays and the data of each tensor are there (not NULL), that data are aligned,
 * indices and numbers of threads in their range, and dtype, rank (0 to OCTET_MOST_DIMENSIONS), sizes and strides of each input, at most
 * 2**40 elements. A wrong call is refused before anything is written; a right one behind it gives what it gave before. Not checked,
 * because no call can know it: that memory is as large as sizes and strides say, that an octet_model is one and still open, and that the
 * arrays have as many tensors as the model has inputs or outputs.
 *
 * A tensor in memory of the caller. Elements of a float32 are aligned to 4 bytes, of an int64 to 8; a bool is a
 * byte of 0 or 1. */
typedef struct octet_tensor {
  void* data;
  octet_dtype dtype;
  int32_t rank;
  int64_t sizes[OCTET_MOST_DIMENSIONS];
  int64_t strides[OCTET_MOST_DIMENSIONS]; /* in elements; none is negative */
} octet_tensor;

/* What a model says of an input or output. */
typedef struct octet_value {
  const char* name; /* in the user's model; it lives as long as the octet_model */
  octet_dtype dtype;
  int32_t rank;                         /* when it was exported; -1 where that is not known */
  int32_t fixed_rank;                   /* 1 where inputs of another rank are refused */
  int64_t sizes[OCTET_MOST_DIMENSIONS]; /* when it was exported; -1 for one that may differ between calls */
} octet_value;

/* Reads a file and checks it; NULL on failure. README.md beside this file lists what is checked. Its weights stay mapped into memory
 * until octet_close, so that a file in use is not to be overwritten in place: put a new one there by a rename, as quant.save does. */
OCTET_API octet_model* octet_open(const char* path);
/* The same for a file that is in memory, which may be freed after the call. */
OCTET_API octet_model* octet_open_memory(const void* bytes, size_t size);
/* No call that uses the model may be running. NULL is allowed. */
OCTET_API void octet_close(octet_model* model);

OCTET_API int32_t octet_input_count(const octet_model* model);
OCTET_API int32_t octet_output_count(const octet_model* model);
OCTET_API octet_status octet_describe_input(const octet_model* model, int32_t index, octet_value* value);
OCTET_API octet_status octet_describe_output(const octet_model* model, int32_t index, octet_value* value);

/* The threads that later calls share their work among, the caller's own included. 0, as at the start, is as many as there are. */
OCTET_API octet_status octet_set_threads(octet_model* model, int32_t threads);

/* Fills dtype, rank, sizes and strides of all outputs for inputs of these dtypes, sizes and strides; no data is read. Packs the
 * weights at the first call, and keeps what it has planned for the 64 kinds of inputs that were used last, and no more of it than 64 MiB. */
OCTET_API octet_status octet_plan(octet_model* model, const octet_tensor* inputs, octet_tensor* outputs);

/* Computes. Of the outputs only `data` is read: memory for as many elements as octet_plan says, which lie by its strides. It may
 * not overlap with the inputs'. The first call for new sizes plans for them. */
OCTET_API octet_status octet_run(octet_model* model, const octet_tensor* inputs, octet_tensor* outputs);

/* What went wrong in the last call of this thread that did; it lives until the next such call. Errors of a layer begin with its
 * name in the user's model. */
OCTET_API const char* octet_error(void);

/* The instruction set in use ("avx512vnni", ...), and the version of files that this library reads. */
OCTET_API const char* octet_instruction_set(void);
OCTET_API int32_t octet_file_version(void);

#ifdef __cplusplus
}
#endif
#endif
