// Permission to use AMX's tiles, which Linux gives a process that asks.
#pragma once

#include <string>

namespace octet {

// Asks, once. "" where this process may use tiles from now on, its threads and forks too; else why not, in words. For CPUs that
// have them.
const std::string& ask_for_tiles();

}  // namespace octet
