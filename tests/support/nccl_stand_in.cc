// NCCL's functions for sends and receives, which move memory of the host between the processes of a
// machine. As NCCL, it has no names for messages: what one rank sends to another arrives in order,
// and a rank that receives what no one sends waits for ever.
//
// STAND_IN_FAILS=ncclSend lets that function fail; a colon and a number let it work so often before.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kSystemError = 2, kInvalidUsage = 5;
constexpr uint64_t kRoom = 1 << 16;

// What one rank sends to another: so many bytes were written and read so far.
struct Mailbox {
  std::atomic<uint64_t> written, read;
  char room[kRoom];
};

struct Shared {
  std::atomic<int> joined;
  Mailbox boxes[];
};

struct Group {
  int size, index;
  Shared* shared;
  Mailbox& box(int from, int to) { return shared->boxes[from * size + to]; }
};

struct Message {
  Group* group;
  int peer;
  const char* from;  // null where it is received
  char* to;
  uint64_t left;

  // Moves what can be moved; returns whether that was anything.
  bool advance() {
    Mailbox& box = from ? group->box(group->index, peer) : group->box(peer, group->index);
    const uint64_t written = box.written.load(), read = box.read.load();
    const uint64_t place = (from ? written : read) % kRoom;
    const uint64_t ready = from ? kRoom - (written - read) : written - read;
    const uint64_t bytes = std::min({left, ready, kRoom - place});
    if (bytes == 0) return false;
    if (from) {
      std::memcpy(box.room + place, from, bytes);
      from += bytes;
      box.written.fetch_add(bytes);
    } else {
      std::memcpy(to, box.room + place, bytes);
      to += bytes;
      box.read.fetch_add(bytes);
    }
    left -= bytes;
    return true;
  }
};

thread_local int depth = 0, failure = 0;  // of the group of calls that was started
thread_local std::vector<Message> waiting;

bool fails(const char* function) {
  static std::atomic<int> calls{0};
  const char* wanted = std::getenv("STAND_IN_FAILS");
  if (!wanted) return false;
  const std::string text = wanted;
  const size_t colon = text.find(':');
  if (text.substr(0, colon) != function) return false;
  return calls.fetch_add(1) >= (colon == std::string::npos ? 0 : std::atoi(&text[colon + 1]));
}

int run() {
  while (!waiting.empty()) {
    bool moved = false;
    // Of two messages between the same ranks the first goes first.
    std::vector<std::pair<const void*, bool>> begun;
    for (Message& message : waiting) {
      const bool sends = message.from != nullptr;
      const std::pair<const void*, bool> way{&message.group->box(0, message.peer), sends};
      if (std::find(begun.begin(), begun.end(), way) != begun.end()) continue;
      moved |= message.advance();
      if (message.left) begun.push_back(way);
    }
    const auto done = [](const Message& message) { return message.left == 0; };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), done), waiting.end());
    if (!moved) sched_yield();
  }
  return 0;
}

int add(const Message& message) {
  waiting.push_back(message);
  return depth ? 0 : run();
}

}  // namespace

extern "C" {

struct ncclUniqueId {
  char internal[128];
};

int ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id->internal, 0, sizeof id->internal);
  const std::string name = "/nccl-" + std::to_string(getpid()) + "-" +
                           std::to_string(std::random_device{}());
  name.copy(id->internal, sizeof id->internal - 1);
  return fails("ncclGetUniqueId") ? kSystemError : 0;
}

int ncclCommInitRank(void** communicator, int size, ncclUniqueId id, int index) {
  if (fails("ncclCommInitRank")) return kSystemError;
  const size_t bytes = sizeof(Shared) + size_t(size) * size * sizeof(Mailbox);
  const int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, off_t(bytes)) != 0) return kSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  auto* group = new Group{size, index, static_cast<Shared*>(memory)};
  group->shared->joined.fetch_add(1);
  while (group->shared->joined.load() < size) sched_yield();
  if (index == 0) shm_unlink(id.internal);
  *communicator = group;
  return 0;
}

int ncclGroupStart() {
  if (fails("ncclGroupStart")) return kSystemError;
  ++depth;
  return 0;
}

int ncclGroupEnd() {
  if (--depth) return 0;
  const int code = fails("ncclGroupEnd") ? kSystemError : std::exchange(failure, 0);
  if (code) waiting.clear();
  return code ? code : run();
}

int ncclSend(const void* from, size_t count, int type, int peer, void* communicator, void*) {
  auto* group = static_cast<Group*>(communicator);
  if (type != 0 || peer < 0 || peer >= group->size) return kInvalidUsage;
  if (fails("ncclSend")) return failure = kSystemError;
  return add({group, peer, static_cast<const char*>(from), nullptr, count});
}

int ncclRecv(void* to, size_t count, int type, int peer, void* communicator, void*) {
  auto* group = static_cast<Group*>(communicator);
  if (type != 0 || peer < 0 || peer >= group->size) return kInvalidUsage;
  if (fails("ncclRecv")) return failure = kSystemError;
  return add({group, peer, nullptr, static_cast<char*>(to), count});
}

int ncclCommGetAsyncError(void*, int* error) {
  *error = fails("ncclCommGetAsyncError") ? kSystemError : 0;
  return 0;
}

const char* ncclGetErrorString(int code) {
  return code == kSystemError ? "unhandled system error" : "invalid usage";
}

}  // extern "C"
