// "late": a stand-in for an accelerator, on the host's memory.
//
// It is as asynchronous as a real one, and later: each stream is a thread, operators and copies are
// queued and the host runs ahead, and what is freed is overwritten in the order of its stream. So
// code that does not wait for what it needs reads NaN or old values here, on any machine.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace late {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;
constexpr int STREAMS = 17;  // of each device; number 0 is its default stream

// -- what was asked of the devices --
void count(const std::string& what, long by = 1);
std::map<std::string, long> counts();
// A call that makes a context on the device.
void touch(c10::DeviceIndex device);
std::vector<int> touched();
void forget();  // counts and contexts

// -- streams --
// Longest delays in microseconds; each is drawn between half of it and all. What `seed` draws them
// from is taken by streams when they are first used.
void set_delays(int copy_us, int kernel_us, int seed);
int copy_delay();
int kernel_delay();

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);  // returns the one before
c10::Stream current_stream(c10::DeviceIndex device);

// What one stream has to do, in order.
class Queue {
 public:
  Queue();
  void push(std::function<void()> task, int delay_us = 0);
  bool is_empty();
  void drain();  // the host waits

 private:
  struct Item {
    std::function<void()> task;
    int delay_us;
  };
  void run();
  void sleep(int most_us);

  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<Item> items_;
  bool busy_ = false;
  std::mt19937 random_;
};

Queue& queue(const c10::Stream& stream);

// A place in a stream that another stream, or the host, may wait for.
class Mark {
 public:
  void record(const c10::Stream& stream);
  void hold(const c10::Stream& stream);  // `stream` goes on after it
  bool is_reached();
  void wait();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable reached;
    uint64_t recorded = 0, done = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// -- memory --
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
// The memory is not given to others before what `stream` has queued by then is done.
void keep_for(const c10::DataPtr& memory, const c10::Stream& stream);
// Holds a block of pinned memory; null where `address` is not in one.
std::shared_ptr<void> pinned(const void* address);
// Memory that is the host's own becomes pinned, and is no more: waits for copies under way.
void register_host(uintptr_t address, size_t bytes);
void unregister_host(uintptr_t address);
std::vector<long> memory_used();  // device now and at most, pinned now and at most

// Host memory that a copy under way reads or writes, until the object is gone.
class Use {
 public:
  Use(const void* address, size_t bytes, bool writes);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  long number_;
};
// 1: a copy under way reads from there; 2: one writes there; 3: both.
int uses_of(uintptr_t address, size_t bytes);

}  // namespace late
