// Included before each file of a wheel's kernels, so that what Debian 12's headers ask of the C library is there in
// versions from 2.27 on: torch's own wheels ask for 2.28.
#pragma once

// Locks and keys of threads, which moved from libpthread to libc in 2.34 and got a new version there. The old one is the same code, in both.
#if defined(__x86_64__)
#define OCTET_FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OCTET_FIRST_VERSION "GLIBC_2.17"
#endif
__asm__(".symver pthread_rwlock_rdlock, pthread_rwlock_rdlock@" OCTET_FIRST_VERSION);
__asm__(".symver pthread_rwlock_wrlock, pthread_rwlock_wrlock@" OCTET_FIRST_VERSION);
__asm__(".symver pthread_rwlock_unlock, pthread_rwlock_unlock@" OCTET_FIRST_VERSION);
__asm__(".symver pthread_key_create, pthread_key_create@" OCTET_FIRST_VERSION);
__asm__(".symver pthread_key_delete, pthread_key_delete@" OCTET_FIRST_VERSION);
__asm__(".symver pthread_getspecific, pthread_getspecific@" OCTET_FIRST_VERSION);
__asm__(".symver pthread_setspecific, pthread_setspecific@" OCTET_FIRST_VERSION);

// Of 2.32: libstdc++ counts references without atomic instructions where it says that there is one thread. Never so is
// always right. Hidden, so that nobody else in the process sees this one.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}

// Of libstdc++ 11 (GLIBCXX_3.4.29): C++20's str() of a stream that is kept. Compiled here, it is not asked of the library.
#include <sstream>
template std::string std::stringbuf::str() const&;
