#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class Store;
}

namespace acc::distributed {

// One more connection to a program's store: whoever waits for a key in the store itself keeps all
// others from it. The groups of this process that are made in one store share it, so nothing may
// wait in it, and it is closed when the last of them has ended.
//
// One for each group would be simpler, but each is slow where the machine's name server is: torch
// asks it for the name of every address that it connects to (formatSockAddr in c10d's Socket.cpp,
// 2.11), and glibc waits five seconds for an answer that was lost.
struct Connection {
  // By which it is found. It is the groups that hold it, and not what outlives them: the store may
  // be the server, whose port and keys are to go with the groups.
  c10::intrusive_ptr<c10d::Store> program;
  c10::intrusive_ptr<c10d::Store> opened;
};

// The one that groups of this process have to what `store` is, or is a part of; else a new one.
std::shared_ptr<const Connection> connection_to(const c10::intrusive_ptr<c10d::Store>& store);

// What `store` is, with its prefixes and `prefix` behind them, over that connection.
c10::intrusive_ptr<c10d::Store> beside(const c10::intrusive_ptr<c10d::Store>& store,
                                       const Connection& connection, const char* prefix);

}  // namespace acc::distributed
