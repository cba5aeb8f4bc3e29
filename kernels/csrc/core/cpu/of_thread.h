// What a thread keeps for itself until it ends. A `thread_local` with a destructor is no place for it: where the system has no memory
// to note the destructor, the C library ends the process.
#pragma once

namespace octet {

// Calls end(place) when this thread ends, or at once, before it throws std::bad_alloc, where there is no memory to note that.
void end_with_thread(void* place, void (*end)(void*));

// The object of this thread, which is made at the first call: `thread_local T* own = nullptr; return of_thread(own);`.
template <class T>
T& of_thread(T*& own) {
  if (!own) {
    own = new T;
    end_with_thread(&own, [](void* place) {
      T*& object = *static_cast<T**>(place);
      delete object;
      object = nullptr;  // what ends later in this thread may compute once more
    });
  }
  return *own;
}

}  // namespace octet
