// Preloaded by fuzz_kills.py: ends the process, or lets the system say no, at one of its calls that change files of a folder, or lets
// one of its allocations fail.
//     g++ -std=c++17 -O2 -shared -fPIC fault_shim.cpp -o fault_shim.so
// Armed by fault_arm_files and fault_arm_memory, or by the environment: OCTET_FAULT_FOLDER or OCTET_FAULT_LIBRARIES, with
// OCTET_FAULT_PLACE, OCTET_FAULT_ACTION and, for files, OCTET_FAULT_ERRNO.
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

enum Action { kNone = 0, kKillBefore = 1, kKillAfter = 2, kKillHalfWay = 3, kErrorFromThere = 4, kErrorOnce = 5 };

// One of files or of memory.
struct Fault {
  std::atomic<int> action{kNone};
  std::atomic<bool> counts{false};
  std::atomic<long> place{0}, seen{0};
  int error = 0;

  void arm(long at, int what, int number) {
    place = at, error = number, seen = 0, action = what;
    counts = true;
  }
  // What happens to this call.
  int next() {
    if (!counts.load(std::memory_order_relaxed)) return kNone;
    const long now = seen++, at = place;
    const int what = action;
    return now == at || (now > at && what == kErrorFromThere) ? what : kNone;
  }
};

Fault files, memory;
char folder[PATH_MAX];
size_t folder_size = 0;

[[noreturn]] void end() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

template <class Fn>
Fn real(const char* name, Fn) {
  return reinterpret_cast<Fn>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static auto* const real_##name = real(#name, &name)

bool is_inside(const char* path) {
  return folder_size && std::strncmp(path, folder, folder_size) == 0 && (path[folder_size] == '/' || path[folder_size] == 0);
}

// Of an open file or folder.
bool is_inside(int descriptor) {
  if (!files.counts.load(std::memory_order_relaxed)) return false;
  char link[64], path[PATH_MAX];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return false;
  path[size] = 0;
  return is_inside(path);
}

bool is_inside(int at, const char* path) {
  if (!files.counts.load(std::memory_order_relaxed)) return false;
  return path[0] == '/' ? is_inside(path) : at != AT_FDCWD && is_inside(at);
}

// A call that is done whole or not at all. `removes`: what the system never refuses for want of room.
template <class Call>
int whole(bool inside, Call call, bool removes = false) {
  const int what = inside ? files.next() : kNone;
  if (what == kKillBefore || what == kKillHalfWay) end();
  if ((what == kErrorFromThere || what == kErrorOnce) && !removes) {
    errno = files.error;
    return -1;
  }
  const int result = call();
  if (what == kKillAfter) end();
  return result;
}

// One of which half may be done.
template <class Call>
ssize_t written(int descriptor, size_t size, Call call) {
  const int what = is_inside(descriptor) ? files.next() : kNone;
  if (what == kKillBefore) end();
  if (what == kKillHalfWay) {
    call(size / 2);
    end();
  }
  if (what == kErrorFromThere || what == kErrorOnce) {
    if (files.seen == files.place + 1 && size > 1) return call(size / 2);  // as a disk that fills up
    errno = files.error;
    return -1;
  }
  const ssize_t result = call(size);
  if (what == kKillAfter) end();
  return result;
}

constexpr int kMostLibraries = 8;
struct Range {
  uintptr_t begin, end;
};
Range libraries[kMostLibraries], standard;
int library_count = 0;

int note_library(dl_phdr_info* info, size_t, void* wanted) {
  Range range{UINTPTR_MAX, 0};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    if (begin < range.begin) range.begin = begin;
    if (begin + info->dlpi_phdr[i].p_memsz > range.end) range.end = begin + info->dlpi_phdr[i].p_memsz;
  }
  const char* const names = static_cast<const char*>(wanted);
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  const char* const name = slash ? slash + 1 : info->dlpi_name;
  if (std::strstr(name, "libstdc++")) standard = range;
  char copy[256];
  std::snprintf(copy, sizeof copy, "%s", names);
  for (char *rest = copy, *one; (one = strtok_r(rest, ",", &rest));) {
    const bool is_program = std::strcmp(one, ".") == 0 && !*info->dlpi_name;
    if ((is_program || (*name && std::strncmp(name, one, std::strlen(one)) == 0)) && library_count < kMostLibraries)
      libraries[library_count++] = range;
  }
  return 0;
}

bool is_of(const Range& range, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= range.begin && at < range.end;
}

bool is_of_libraries(const void* address) {
  for (int i = 0; i < library_count; ++i)
    if (is_of(libraries[i], address)) return true;
  return false;
}

thread_local bool looking = false;

bool fails(const void* caller) {
  if (!memory.counts.load(std::memory_order_relaxed) || looking) return false;
  bool ours = is_of_libraries(caller);
  if (!ours && is_of(standard, caller)) {  // a string of theirs grows there
    looking = true;
    void* frames[6];
    const int count = backtrace(frames, 6);
    for (int i = 0; i < count && !ours; ++i) ours = is_of_libraries(frames[i]);
    looking = false;
  }
  if (!ours) return false;
  const int what = memory.next();
  return what == kErrorFromThere || what == kErrorOnce;
}

void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

}  // namespace

extern "C" {

// Counts the calls that change files in `inside`; at number `place` comes the action.
void fault_arm_files(const char* inside, long place, int action, int error) {
  std::snprintf(folder, sizeof folder, "%s", inside);
  folder_size = std::strlen(folder);
  files.arm(place, action, error);
}

// Counts the allocations of libraries whose names begin so, with commas between; "." is the program.
void fault_arm_memory(const char* names, long place, int action) {
  memory.counts = false;
  library_count = 0;
  dl_iterate_phdr(note_library, const_cast<char*>(names));
  void* frames[2];
  backtrace(frames, 2);  // which allocates at its first call
  memory.arm(place, action, 0);
}

long fault_seen_files() { return files.seen; }
long fault_seen_memory() { return memory.seen; }

void fault_disarm() { files.counts = memory.counts = false; }

// SIGKILL after so long, whatever the process does then.
int fault_kill_after(double seconds) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL, event.sigev_signo = SIGKILL;
  timer_t timer;
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return errno;
  itimerspec when{};
  when.it_value.tv_sec = static_cast<time_t>(seconds);
  when.it_value.tv_nsec = static_cast<long>((seconds - static_cast<double>(when.it_value.tv_sec)) * 1e9) + 1;
  return timer_settime(timer, 0, &when, nullptr) == 0 ? 0 : errno;
}

__attribute__((constructor)) void arm_by_environment() {
  const char *const inside = getenv("OCTET_FAULT_FOLDER"), *const names = getenv("OCTET_FAULT_LIBRARIES");
  const char *const place = getenv("OCTET_FAULT_PLACE"), *const action = getenv("OCTET_FAULT_ACTION"), *const error = getenv("OCTET_FAULT_ERRNO");
  if (!place || !action) return;
  if (inside) fault_arm_files(inside, std::atol(place), std::atoi(action), error ? std::atoi(error) : ENOSPC);
  if (names) fault_arm_memory(names, std::atol(place), std::atoi(action));
}

// With OCTET_FAULT_COUNT the number of calls is written there at the end.
__attribute__((destructor)) void tell_count() {
  const char* const path = getenv("OCTET_FAULT_COUNT");
  if (!path) return;
  const long count = getenv("OCTET_FAULT_FOLDER") ? files.seen.load() : memory.seen.load();
  fault_disarm();
  if (FILE* const file = std::fopen(path, "w")) {
    std::fprintf(file, "%ld", count);
    std::fclose(file);
  }
}

#define OPEN(name, declared, given, at)                                                      \
  int name declared {                                                                        \
    REAL(name);                                                                              \
    mode_t mode = 0;                                                                         \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                     \
      va_list more;                                                                          \
      va_start(more, flags);                                                                 \
      mode = va_arg(more, mode_t);                                                           \
      va_end(more);                                                                          \
    }                                                                                        \
    const bool changes = (flags & (O_CREAT | O_TRUNC)) && is_inside(at, path);               \
    return whole(changes, [&] { return real_##name given; });                                \
  }
OPEN(open, (const char* path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char* path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char* path, int flags, ...), (at, path, flags, mode), at)
OPEN(openat64, (int at, const char* path, int flags, ...), (at, path, flags, mode), at)

// The C library's own files, of which only opening is seen.
FILE* fopen(const char* path, const char* mode) {
  REAL(fopen);
  FILE* file = nullptr;
  whole((*mode == 'w' || *mode == 'a') && is_inside(AT_FDCWD, path), [&] { return (file = real_fopen(path, mode)) ? 0 : -1; });
  return file;
}

ssize_t write(int descriptor, const void* from, size_t size) {
  REAL(write);
  return written(descriptor, size, [&](size_t part) { return real_write(descriptor, from, part); });
}
ssize_t pwrite64(int descriptor, const void* from, size_t size, off64_t place) {
  REAL(pwrite64);
  return written(descriptor, size, [&](size_t part) { return real_pwrite64(descriptor, from, part, place); });
}
ssize_t writev(int descriptor, const iovec* parts, int count) {
  REAL(writev);
  return whole(is_inside(descriptor), [&] { return static_cast<int>(real_writev(descriptor, parts, count)); });
}
size_t fwrite(const void* from, size_t size, size_t count, FILE* file) {
  REAL(fwrite);
  if (!files.counts.load(std::memory_order_relaxed)) return real_fwrite(from, size, count, file);
  const ssize_t result = written(fileno(file), size * count, [&](size_t part) {
    const size_t bytes = real_fwrite(from, 1, part, file);
    std::fflush(file);
    return static_cast<ssize_t>(bytes);
  });
  if (result >= 0 && static_cast<size_t>(result) == size * count) return count;
  errno = files.error;  // the C library writes on until it is refused
  return result < 0 ? 0 : static_cast<size_t>(result) / (size ? size : 1);
}
int fsync(int descriptor) {
  REAL(fsync);
  return whole(is_inside(descriptor), [&] { return real_fsync(descriptor); });
}
int ftruncate64(int descriptor, off64_t size) {
  REAL(ftruncate64);
  return whole(is_inside(descriptor), [&] { return real_ftruncate64(descriptor, size); });
}
int rename(const char* from, const char* to) {
  REAL(rename);
  return whole(is_inside(AT_FDCWD, to), [&] { return real_rename(from, to); });
}
int renameat(int at, const char* from, int to_at, const char* to) {
  REAL(renameat);
  return whole(is_inside(to_at, to), [&] { return real_renameat(at, from, to_at, to); });
}
int mkdir(const char* path, mode_t mode) {
  REAL(mkdir);
  return whole(is_inside(AT_FDCWD, path), [&] { return real_mkdir(path, mode); });
}
int chmod(const char* path, mode_t mode) {
  REAL(chmod);
  return whole(is_inside(AT_FDCWD, path), [&] { return real_chmod(path, mode); }, true);
}
int unlink(const char* path) {
  REAL(unlink);
  return whole(is_inside(AT_FDCWD, path), [&] { return real_unlink(path); }, true);
}
int unlinkat(int at, const char* path, int flags) {
  REAL(unlinkat);
  return whole(is_inside(at, path), [&] { return real_unlinkat(at, path, flags); }, true);
}
int rmdir(const char* path) {
  REAL(rmdir);
  return whole(is_inside(AT_FDCWD, path), [&] { return real_rmdir(path); }, true);
}

void* malloc(size_t size) { return fails(__builtin_return_address(0)) ? no_memory() : __libc_malloc(size); }
void* calloc(size_t count, size_t size) { return fails(__builtin_return_address(0)) ? no_memory() : __libc_calloc(count, size); }
void* realloc(void* old, size_t size) { return fails(__builtin_return_address(0)) ? no_memory() : __libc_realloc(old, size); }
void* aligned_alloc(size_t alignment, size_t size) {
  return fails(__builtin_return_address(0)) ? no_memory() : __libc_memalign(alignment, size);
}
int posix_memalign(void** result, size_t alignment, size_t size) {
  void* const made = fails(__builtin_return_address(0)) ? nullptr : __libc_memalign(alignment, size);
  if (!made) return ENOMEM;
  *result = made;
  return 0;
}

}  // extern "C"

void* operator new(size_t size) {
  void* const made = fails(__builtin_return_address(0)) ? nullptr : __libc_malloc(size ? size : 1);
  if (!made) throw std::bad_alloc();
  return made;
}
void* operator new[](size_t size) {
  void* const made = fails(__builtin_return_address(0)) ? nullptr : __libc_malloc(size ? size : 1);
  if (!made) throw std::bad_alloc();
  return made;
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete[](void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }
void operator delete[](void* made, size_t) noexcept { std::free(made); }
