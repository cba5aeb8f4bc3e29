#include "core/cpu/of_thread.h"

#include <new>

#include "core/cpu/memory.h"

#if !defined(_WIN32)
#include <pthread.h>

#include <cerrno>
#endif

namespace octet {
namespace {

struct Entry {
  void* object;
  void (*end)(void*);
  Entry* next;
};

void end_all(void* first) {
  for (Entry* entry = static_cast<Entry*>(first); entry;) {
    Entry* const next = entry->next;
    entry->end(entry->object);
    delete entry;
    entry = next;
  }
}

#if !defined(_WIN32)
// The entries of each thread. When the library is closed, or the process ends, those of other threads are left to the system.
class Entries {
 public:
  Entries() : problem_(pthread_key_create(&key_, end_all)) {}
  ~Entries() {
    if (problem_) return;
    end_all(pthread_getspecific(key_));
    pthread_key_delete(key_);
  }

  // Whether there was memory for it. Without a key, and behind the end of the process, nobody ends the object.
  bool add(Entry* entry) {
    entry->next = problem_ ? nullptr : static_cast<Entry*>(pthread_getspecific(key_));
    return problem_ || pthread_setspecific(key_, entry) != ENOMEM;
  }

 private:
  pthread_key_t key_{};
  const int problem_;
};
#else
struct Entries {
  bool add(Entry* entry) {
    thread_local struct Own {
      Entry* first = nullptr;
      ~Own() { end_all(first); }
    } own;
    entry->next = own.first, own.first = entry;
    return true;
  }
};
#endif

}  // namespace

void end_with_thread(void* object, void (*end)(void*)) {
  static Entries entries;
  Entry* const entry = new (std::nothrow) Entry{object, end, nullptr};
  if (entry && entries.add(entry)) return;
  delete entry;
  end(object);
  throw_no_memory(sizeof(Entry), "what a thread keeps");
}

}  // namespace octet
