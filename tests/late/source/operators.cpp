// Copies, and every operator of torch: the CPU's kernels, queued on the device's streams.
#include "late.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

namespace late {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

bool is_here(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

c10::Stream stream_of(const Tensor& t) { return current_stream(t.device().index()); }

// The same memory, as a tensor of the CPU. It does not hold the memory: freed memory is overwritten
// behind all that its stream has queued, as on a device.
Tensor on_cpu(const Tensor& t) {
  auto address = t.numel() ? t.data_ptr() : nullptr;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  return at::from_blob(address, t.sizes(), t.strides(), options);
}

void submit(const c10::Stream& stream, int delay_us, std::function<void()> task) {
  touch(stream.device_index());
  auto run = [task = std::move(task)] {
    at::AutoDispatchBelowADInplaceOrView below;
    task();
  };
  queue(stream).push(std::move(run), delay_us);
}

// -- copies, by the rules of torch's Copy.cu --
const Tensor& copy_on_device(const Tensor& source, const Tensor& target) {
  auto from = on_cpu(source), to = on_cpu(target);
  if (source.device() == target.device()) {
    count("copies on a device");
    submit(stream_of(source), kernel_delay(), [from, to] { to.copy_(from); });
    return target;
  }
  count("copies between devices");
  queue(stream_of(source)).drain();
  queue(stream_of(target)).drain();
  to.copy_(from);
  return target;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking);

const Tensor& copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto stream = stream_of(target);
  Tensor from = source;
  if (source.scalar_type() != target.scalar_type()) {
    if (non_blocking) {  // converted on the device
      auto there = at::empty(target.sizes(), target.options().dtype(source.scalar_type()));
      copy_from(source.contiguous(), there, true);
      copy_from(there, target, true);
      return target;
    }
    from = source.to(target.scalar_type());
  }
  from = from.expand_as(target).contiguous();
  auto to = on_cpu(target);
  auto block = from.numel() ? pinned(from.data_ptr()) : nullptr;
  if (block) {
    auto raw = on_cpu(from);
    auto use = std::make_shared<Use>(from.data_ptr(), from.nbytes(), false);
    submit(stream, copy_delay(), [raw, to, block, use] { to.copy_(raw); });
  } else {
    count("pageable copies to a device");
    submit(stream, copy_delay(), [staged = from.clone(), to] { to.copy_(staged); });
  }
  count(non_blocking ? "copies to a device" : "blocking copies to a device");
  if (!non_blocking) queue(stream).drain();
  return target;
}

const Tensor& copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto stream = stream_of(source);
  bool is_plain = source.scalar_type() == target.scalar_type() && source.is_contiguous() &&
                  target.is_contiguous();
  if (!is_plain && non_blocking && target.is_contiguous()) {  // converted on the device
    copy_from(source.to(target.scalar_type()).contiguous(), target, true);
    return target;
  }
  if (!is_plain) {
    count("blocking copies to the host");
    auto whole = source.contiguous();
    auto arrived = at::empty(source.sizes(), at::TensorOptions().dtype(source.dtype()));
    submit(stream, copy_delay(), [from = on_cpu(whole), arrived] { arrived.copy_(from); });
    queue(stream).drain();
    target.copy_(arrived);
    return target;
  }
  auto from = on_cpu(source), to = on_cpu(target);
  auto block = target.numel() ? pinned(target.data_ptr()) : nullptr;
  if (block && non_blocking) {
    count("copies to the host");
    auto use = std::make_shared<Use>(target.data_ptr(), target.nbytes(), true);
    submit(stream, copy_delay(), [from, to, block, use] { to.copy_(from); });
    return target;
  }
  count("blocking copies to the host");
  submit(stream, copy_delay(), [from, to] { to.copy_(from); });
  queue(stream).drain();
  return target;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (is_here(source) && is_here(target)) return copy_on_device(source, target);
  if (is_here(target)) return copy_to_device(source, target, non_blocking);
  return copy_to_host(source, target, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& t) {
  count("items");
  queue(stream_of(t)).drain();
  return on_cpu(t).item();
}

// -- operators --
template <class Change>
IValue with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (!value.isList()) return value;
  bool has_tensor = false;
  for (const auto& each : value.toListRef()) has_tensor |= each.isTensor();
  if (!has_tensor) return value;
  auto changed = c10::impl::GenericList(value.toList().elementType());
  for (const auto& each : value.toListRef()) changed.push_back(with_tensors(each, change));
  return changed;
}

void write(const IValue& target, const IValue& result) {
  if (target.isTensor()) {
    // In evaluation a CPU's batch norm saves nothing, whatever its sizes were foretold to be.
    if (target.toTensor().defined() && result.toTensor().numel() > 0) {
      target.toTensor().copy_(result.toTensor());
    }
  } else if (target.isList()) {
    for (size_t i = 0; i < target.toListRef().size(); ++i) {
      write(target.toListRef()[i], result.toListRef()[i]);
    }
  }
}

// A call of one operator with tensors on a device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), device_(TYPE, current_device()) {
    auto first = stack->end() - static_cast<long>(schema_.arguments().size());
    arguments_.assign(first, stack->end());
    stack->erase(first, stack->end());
    find_device();
    find_aliases();
  }

  Stack run() {
    c10::DeviceGuard guard(device_);
    if (may_be_queued() && make_outputs()) {
      enqueue();
    } else {
      run_now();
    }
    return outputs_;
  }

 private:
  void find_device() {
    bool is_found = false;
    for (const auto& each : arguments_) {
      with_tensors(each, [&](const Tensor& t) {
        if (is_here(t) && !is_found) {
          device_ = t.device();
          is_found = true;
        }
        return t;
      });
      if (!is_found && each.isDevice() && each.toDevice().type() == TYPE &&
          each.toDevice().has_index()) {
        device_ = each.toDevice();
      }
    }
    has_tensor_ = is_found;
  }

  // Which arguments the results are, such as that of an operator in place.
  void find_aliases() {
    for (const auto& result : schema_.returns()) {
      int found = -1;
      for (size_t i = 0; result.alias_info() && i < schema_.arguments().size(); ++i) {
        auto alias = schema_.arguments()[i].alias_info();
        if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) {
          found = static_cast<int>(i);
        }
      }
      aliases_.push_back(found);
    }
  }

  bool may_be_queued() const {
    if (!has_tensor_) return false;
    for (const auto& each : schema_.arguments()) {
      if (each.type()->str().find("Generator") != std::string::npos) return false;
    }
    for (const auto& each : schema_.returns()) {
      if (each.type()->str() != "Tensor" && each.type()->str() != "Tensor[]") return false;
    }
    return true;
  }

  bool is_in_place() const {
    for (int alias : aliases_) {
      if (alias < 0) return false;
    }
    for (const auto& each : schema_.arguments()) {
      if (each.is_out()) return false;  // it may have to be resized
    }
    return true;
  }

  // Room for the results, of the sizes that the operator's meta kernel tells; false: it has none.
  bool make_outputs() {
    if (is_in_place()) {
      for (int alias : aliases_) outputs_.push_back(arguments_[alias]);
      return true;
    }
    Stack sizes;
    for (const auto& each : arguments_) {
      sizes.push_back(each.isDevice() ? IValue(c10::Device(at::kMeta))
                                      : with_tensors(each, [](const Tensor& t) {
                                          auto options = t.options().device(at::kMeta);
                                          return at::empty_strided(t.sizes(), t.strides(), options);
                                        }));
    }
    auto kept = sizes;  // see run_now
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&sizes);
    } catch (const std::exception&) {
      return false;
    }
    for (size_t i = 0; i < aliases_.size(); ++i) {
      outputs_.push_back(aliases_[i] < 0 ? fresh(sizes[i]) : resized(arguments_[aliases_[i]], sizes[i]));
    }
    return true;
  }

  IValue fresh(const IValue& like) const {
    return with_tensors(like, [this](const Tensor& t) {
      return at::empty_strided(t.sizes(), t.strides(), t.options().device(device_));
    });
  }

  IValue resized(const IValue& out, const IValue& like) const {
    if (out.isTensor() && like.isTensor() && out.toTensor().sizes() != like.toTensor().sizes()) {
      if (out.toTensor().numel()) queue(current_stream(device_.index())).drain();
      at::native::resize_(out.toTensor(), like.toTensor().sizes(), std::nullopt);
    }
    return out;
  }

  Stack cpu_arguments() const {
    Stack found;
    for (const auto& each : arguments_) {
      found.push_back(each.isDevice() && each.toDevice().type() == TYPE
                          ? IValue(c10::Device(at::kCPU))
                          : with_tensors(each, [](const Tensor& t) {
                              return is_here(t) ? on_cpu(t) : t.clone();  // as it is now
                            }));
    }
    return found;
  }

  void enqueue() {
    count("kernels");
    Stack targets;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      targets.push_back(aliases_[i] >= 0 ? IValue() : with_tensors(outputs_[i], on_cpu));
    }
    auto task = [op = op_, arguments = cpu_arguments(), targets] {
      at::NoGradGuard no_grad;
      Stack stack = arguments;
      op.callBoxed(&stack);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (!targets[i].isNone()) write(targets[i], stack[i]);
      }
    };
    submit(current_stream(device_.index()), kernel_delay(), task);
  }

  void run_now() {
    count("operators that the host waits for");
    count("waits for " + schema_.name());
    auto& here = queue(current_stream(device_.index()));
    here.drain();
    Stack stack = cpu_arguments();
    auto kept = stack;  // torch 2.11 lets arguments go before it returns those that are results
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&stack);
    }
    outputs_.clear();
    for (size_t i = 0; i < aliases_.size(); ++i) {
      if (aliases_[i] >= 0) {
        outputs_.push_back(arguments_[aliases_[i]]);
        continue;
      }
      outputs_.push_back(fresh(stack[i]));
      here.drain();  // of what the memory was freed from
      write(with_tensors(outputs_[i], on_cpu), stack[i]);
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  c10::Device device_;
  bool has_tensor_ = false;
  std::vector<IValue> arguments_;
  std::vector<int> aliases_;
  Stack outputs_;
};

void call(const c10::OperatorHandle& op, Stack* stack) {
  for (auto& each : Call(op, stack).run()) stack->push_back(std::move(each));
}

// -- making and viewing, which the host does at once --
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, device_allocator(), KEYS, type, format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), KEYS, type);
}

Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(t, size, stride, offset);
}

Tensor view(const Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_part(Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                 c10::IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}

Tensor& set_storage(Tensor& t, at::Storage storage) { return at::native::set_(t, storage); }
Tensor& set_tensor(Tensor& t, const Tensor& source) { return at::native::set_tensor_(t, source); }

void record_stream(Tensor& t, c10::Stream stream) { keep_for(t.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  // Of which torch has none that it would fall back from.
  for (const char* name : {"convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call>());
  }
}

}  // namespace
}  // namespace late

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("DEVICES") = late::DEVICES;
  m.def("current_device", [] { return static_cast<int>(late::current_device()); });
  m.def("set_device", [](int index) { late::exchange_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_delays", &late::set_delays, "Longest delays of copies and kernels, in microseconds.",
        pybind11::arg("copies"), pybind11::arg("kernels"), pybind11::arg("seed") = 0);
  m.def("counts", &late::counts, "What was asked of the devices.");
  m.def("touched", &late::touched, "The devices that have a context.");
  m.def("forget", &late::forget);
  m.def("memory_used", &late::memory_used);
  m.def("register_host", &late::register_host);
  m.def("unregister_host", &late::unregister_host);
  m.def("uses_of", &late::uses_of, "1: a copy under way reads there; 2: one writes; 3: both.");
}
