// Memory of the devices, pinned memory of the host, and which of it copies under way use.
#include "late.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <tuple>

namespace late {

namespace {

constexpr size_t ALIGNMENT = 512;
constexpr int POISON = 0xFF;  // NaN in every floating-point format

size_t rounded(size_t bytes) {
  return std::max(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

// -- devices --
struct Block {
  void* address;
  size_t bytes;
  c10::Stream stream;  // the one that it was taken on
  std::vector<c10::Stream> users;
};

std::mutex device_mutex;
// Free blocks by device, stream and size: a stream may reuse its own at once.
std::map<std::tuple<int, c10::StreamId, size_t>, std::vector<void*>> free_blocks;
long device_now = 0, device_most = 0;

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  for (const auto& user : block->users) {
    Mark mark;
    mark.record(user);
    mark.hold(block->stream);
  }
  auto address = block->address;
  auto bytes = block->bytes;
  queue(block->stream).push([address, bytes] { std::memset(address, POISON, bytes); });
  std::lock_guard<std::mutex> lock(device_mutex);
  free_blocks[{block->stream.device_index(), block->stream.id(), bytes}].push_back(address);
  device_now -= static_cast<long>(bytes);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    auto stream = current_stream(current_device());
    touch(stream.device_index());
    if (asked == 0) return {nullptr, nullptr, [](void*) {}, stream.device()};
    size_t bytes = rounded(asked);
    void* address = nullptr;
    {
      std::lock_guard<std::mutex> lock(device_mutex);
      auto& blocks = free_blocks[{stream.device_index(), stream.id(), bytes}];
      if (!blocks.empty()) {
        address = blocks.back();
        blocks.pop_back();
      }
      device_now += static_cast<long>(bytes);
      device_most = std::max(device_most, device_now);
    }
    if (!address) {
      address = std::aligned_alloc(ALIGNMENT, bytes);
      std::memset(address, POISON, bytes);
    }
    return {address, new Block{address, bytes, stream, {}}, &release, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

// -- pinned --
// As torch's own, which is rounded up to a power of two.
size_t power_of_two(size_t bytes) {
  size_t power = ALIGNMENT;
  while (power < bytes) power *= 2;
  return power;
}

struct PinnedBlock {
  explicit PinnedBlock(size_t size) : bytes(power_of_two(size)), owns(true) {
    address = std::aligned_alloc(ALIGNMENT, bytes);
  }
  // Memory of somebody else.
  PinnedBlock(void* memory, size_t size) : address(memory), bytes(size), owns(false) {}
  ~PinnedBlock() {
    if (owns) std::free(address);
  }
  void* address;
  size_t bytes;
  bool owns;
};

std::mutex pinned_mutex;
std::map<uintptr_t, std::shared_ptr<PinnedBlock>> pinned_blocks;
long pinned_now = 0, pinned_most = 0;

void keep(std::shared_ptr<PinnedBlock> block) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_now += static_cast<long>(block->bytes);
  pinned_most = std::max(pinned_most, pinned_now);
  pinned_blocks[reinterpret_cast<uintptr_t>(block->address)] = std::move(block);
}

// Copies under way hold the block: it is freed with the last of them.
void unpin(void* address) {
  std::shared_ptr<PinnedBlock> block;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned_blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == pinned_blocks.end()) return;
  block = found->second;
  pinned_now -= static_cast<long>(block->bytes);
  pinned_blocks.erase(found);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_shared<PinnedBlock>(bytes);
    count("pinned allocations");
    keep(block);
    return {block->address, block->address, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

DeviceAllocator on_device;
PinnedAllocator on_host;
REGISTER_ALLOCATOR(TYPE, &on_device)

// -- uses --
struct Range {
  uintptr_t start, stop;
  bool writes;
};

std::mutex use_mutex;
std::map<long, Range> in_use;
long next_use = 0;

}  // namespace

c10::Allocator* device_allocator() { return &on_device; }
c10::Allocator* pinned_allocator() { return &on_host; }

void keep_for(const c10::DataPtr& memory, const c10::Stream& stream) {
  auto block = static_cast<Block*>(memory.get_context());
  if (!block) return;
  std::lock_guard<std::mutex> lock(device_mutex);
  block->users.push_back(stream);
}

std::shared_ptr<void> pinned(const void* address) {
  auto place = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned_blocks.upper_bound(place);
  if (next == pinned_blocks.begin()) return nullptr;
  auto& [start, block] = *std::prev(next);
  return place < start + block->bytes ? std::shared_ptr<void>(block) : nullptr;
}

void register_host(uintptr_t address, size_t bytes) {
  keep(std::make_shared<PinnedBlock>(reinterpret_cast<void*>(address), bytes));
}

void unregister_host(uintptr_t address) {
  std::shared_ptr<void> block = pinned(reinterpret_cast<void*>(address));
  if (!block) return;
  auto bytes = static_cast<PinnedBlock*>(block.get())->bytes;
  while (uses_of(address, bytes)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  unpin(reinterpret_cast<void*>(address));
}

std::vector<long> memory_used() {
  std::scoped_lock lock(device_mutex, pinned_mutex);
  return {device_now, device_most, pinned_now, pinned_most};
}

Use::Use(const void* address, size_t bytes, bool writes) {
  auto start = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(use_mutex);
  number_ = next_use++;
  in_use[number_] = {start, start + bytes, writes};
}

Use::~Use() {
  std::lock_guard<std::mutex> lock(use_mutex);
  in_use.erase(number_);
}

int uses_of(uintptr_t address, size_t bytes) {
  int found = 0;
  std::lock_guard<std::mutex> lock(use_mutex);
  for (const auto& [number, range] : in_use) {
    if (range.start < address + bytes && address < range.stop) found |= range.writes ? 2 : 1;
  }
  return found;
}

}  // namespace late
