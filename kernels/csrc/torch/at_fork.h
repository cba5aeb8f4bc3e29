// Locks that a fork leaves usable in the child.
#pragma once

#include <shared_mutex>

namespace octet {

// A fork copies a mutex that another thread holds as it is, and that thread is not in the child: whoever asks for it there
// waits for ever. This one is taken by the thread that forks before it does, so that what it guards is whole in the child
// too, and is free in both processes afterwards. It must live as long as the process.
//
// The thread that forks takes all of these, in the order in which they were made. So none of them may be asked for while
// another is held.
class ForkedMutex : public std::shared_mutex {
 public:
  ForkedMutex();
};

}  // namespace octet
