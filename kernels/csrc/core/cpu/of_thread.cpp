#include "core/cpu/of_thread.h"

#include <atomic>
#include <new>
#include <utility>

#include "core/cpu/memory.h"

#if !defined(_WIN32)
#include <pthread.h>

#include <cerrno>
#endif

namespace octet {
namespace {

struct Entry {
  void* place;
  void (*end)(void*);
  Entry* next;
};

void end_all(void* first) {
  for (Entry* entry = static_cast<Entry*>(first); entry;) {
    entry->end(entry->place);
    delete std::exchange(entry, entry->next);
  }
}

#if !defined(_WIN32)
// Whether the key is there: not when the process ends, when another library may have been given its number.
std::atomic<bool> has_key{false};

// The entries of each thread. When the library is closed, or the process ends, those of other threads are left to the system.
class Entries {
 public:
  Entries() { has_key = pthread_key_create(&key_, end_all) == 0; }
  ~Entries() {
    if (!has_key.exchange(false)) return;
    end_all(pthread_getspecific(key_));
    pthread_key_delete(key_);
  }

  // Whether there was memory for it. Without a key nobody ends the object.
  bool add(Entry* entry) {
    if (!has_key) return delete entry, true;
    entry->next = static_cast<Entry*>(pthread_getspecific(key_));
    return pthread_setspecific(key_, entry) != ENOMEM;
  }

 private:
  pthread_key_t key_{};
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

void end_with_thread(void* place, void (*end)(void*)) {
  static Entries entries;
  Entry* const entry = new (std::nothrow) Entry{place, end, nullptr};
  if (entry && entries.add(entry)) return;
  delete entry;
  end(place);
  throw_no_memory(sizeof(Entry), "what a thread keeps");
}

}  // namespace octet
