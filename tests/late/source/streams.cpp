// Streams as threads, events, and what torch asks of a device's runtime.
#include "late.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace late {

namespace {

std::mutex counters;
std::map<std::string, long> counted;
std::set<int> contexts;

std::atomic<int> copies_us{500}, kernels_us{0}, seed_of_delays{0};

std::mutex pool;
Queue* queues[DEVICES][STREAMS];  // never deleted: their threads wait for work to the very end
std::atomic<int> next_stream{0};

thread_local c10::DeviceIndex device_here = 0;
thread_local c10::StreamId stream_here[DEVICES] = {};

c10::Device device(c10::DeviceIndex index) {
  return c10::Device(TYPE, index < 0 ? device_here : index);
}

}  // namespace

void count(const std::string& what, long by) {
  std::lock_guard<std::mutex> lock(counters);
  counted[what] += by;
}

std::map<std::string, long> counts() {
  std::lock_guard<std::mutex> lock(counters);
  return counted;
}

void touch(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(counters);
  contexts.insert(index);
}

std::vector<int> touched() {
  std::lock_guard<std::mutex> lock(counters);
  return {contexts.begin(), contexts.end()};
}

void forget() {
  std::lock_guard<std::mutex> lock(counters);
  counted.clear();
  contexts.clear();
}

void set_delays(int copy_us, int kernel_us, int seed) {
  copies_us = copy_us;
  kernels_us = kernel_us;
  seed_of_delays = seed;
}

int copy_delay() { return copies_us; }
int kernel_delay() { return kernels_us; }

c10::DeviceIndex current_device() { return device_here; }

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  auto before = device_here;
  if (index >= 0) device_here = index;
  return before;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), stream_here[device(index).index()]);
}

// -- queues --
Queue::Queue() : random_(seed_of_delays) {
  std::thread([this] { run(); }).detach();
}

void Queue::push(std::function<void()> task, int delay_us) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({std::move(task), delay_us});
  }
  work_.notify_one();
}

bool Queue::is_empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  return items_.empty() && !busy_;
}

void Queue::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return items_.empty() && !busy_; });
}

void Queue::run() {
  for (;;) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] { return !items_.empty(); });
      item = std::move(items_.front());
      items_.pop_front();
      busy_ = true;
    }
    try {
      sleep(item.delay_us);
      item.task();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "late: what was queued has failed: %s\n", error.what());
      std::abort();
    }
    item.task = nullptr;  // with all that it holds
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
    if (items_.empty()) idle_.notify_all();
  }
}

void Queue::sleep(int most_us) {
  if (most_us <= 0) return;
  int least = most_us / 2;
  int drawn = least + static_cast<int>(random_() % (most_us - least + 1));
  std::this_thread::sleep_for(std::chrono::microseconds(drawn));
}

Queue& queue(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(pool);
  auto& found = queues[stream.device_index()][stream.id()];
  if (!found) found = new Queue;
  return *found;
}

// -- events --
void Mark::record(const c10::Stream& stream) {
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    number = ++state_->recorded;
  }
  touch(stream.device_index());
  queue(stream).push([state = state_, number] {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done = std::max(state->done, number);
    state->reached.notify_all();
  });
}

void Mark::hold(const c10::Stream& stream) {
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    number = state_->recorded;
  }
  touch(stream.device_index());
  queue(stream).push([state = state_, number] {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->reached.wait(lock, [&] { return state->done >= number; });
  });
}

bool Mark::is_reached() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->done >= state_->recorded;
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->reached.wait(lock, [this] { return state_->done >= state_->recorded; });
}

// -- what torch asks --
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return device(-1); }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange_device(d.index()); }
  c10::Device exchangeDevice(c10::Device d) const override {
    return device(exchange_device(d.index()));
  }

  c10::Stream getStream(c10::Device d) const override { return current_stream(d.index()); }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, device(d.index()));
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    int number = 1 + next_stream++ % (STREAMS - 1);
    return c10::Stream(c10::Stream::UNSAFE, device(d.index()), number);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    stream_here[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return queue(stream).is_empty(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("waits for a stream");
    queue(stream).drain();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    count("waits for a device");
    for (int number = 0; number < STREAMS; ++number) {
      queue(c10::Stream(c10::Stream::UNSAFE, device(index), number)).drain();
    }
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    static_cast<Mark*>(*event)->record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Mark*>(event)->hold(stream);
  }
  bool queryEvent(void* event) const override {
    touch(device_here);  // the runtime's call makes a context on the thread's device
    return !event || static_cast<Mark*>(event)->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    count("waits for an event");
    if (event) static_cast<Mark*>(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    keep_for(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    std::lock_guard<std::mutex> lock(counters);
    return contexts.count(index) > 0;
  }
  bool isPinnedPtr(const void* address) const override { return pinned(address) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(-1); }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return device_here; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

[[maybe_unused]] const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
}  // namespace late
