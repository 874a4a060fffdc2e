// A CUDA device of CPU memory for the CPU build of PyTorch: real tensors whose device is cuda:0.
//
// PyTorch without CUDA has no device guard, no allocator and no kernels for that device. This file has the first two,
// and the few kernels that a device must have of its own: empty tensors and views. device.py sends all others to the
// CPU's kernels by way of `host_view`, a CPU tensor over the same memory.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

// Memory in the caching allocator's units of 512 bytes, counted.
struct CountingAllocator final : c10::Allocator {
  static constexpr size_t UNIT = 512;
  static inline std::atomic<int64_t> live{0}, peak{0};
  static inline std::mutex lock;
  static inline std::unordered_map<void*, size_t> sizes;

  static void release(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::mutex> held(lock);
    live -= sizes.at(pointer);
    sizes.erase(pointer);
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, DEVICE};
    const size_t size = (bytes + UNIT - 1) / UNIT * UNIT;
    void* pointer = std::aligned_alloc(UNIT, size);
    TORCH_CHECK_WITH(OutOfMemoryError, pointer, "CUDA out of memory (of the fake device)");
    std::lock_guard<std::mutex> held(lock);
    sizes[pointer] = size;
    live += size;
    if (live > peak) peak = live.load();
    return {pointer, pointer, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
CountingAllocator device_memory;
const bool is_registered = (c10::SetAllocator(c10::DeviceType::CUDA, &device_memory, 255), true);

// Page-locked memory of the CPU, known by its address.
struct PinnedAllocator final : c10::Allocator {
  static inline std::mutex lock;
  static inline std::unordered_map<void*, size_t> sizes;

  static void release(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::mutex> held(lock);
    sizes.erase(pointer);
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    void* pointer = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> held(lock);
    sizes[pointer] = bytes;
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool holds(const void* pointer) const {
    std::lock_guard<std::mutex> held(lock);
    for (const auto& [start, size] : sizes)
      if (pointer >= start && pointer < static_cast<char*>(start) + size) return true;
    return false;
  }
};
PinnedAllocator pinned_memory;

// One device and one stream, on which everything is done at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// A CPU tensor over the same memory, which it keeps.
at::Tensor host_view(const at::Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  const size_t bytes = kept->nbytes();
  const auto forget = [](void* held) { delete static_cast<c10::Storage*>(held); };
  c10::DataPtr data(kept->mutable_data(), kept, forget, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false);
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return view;
}

int64_t live_bytes() { return CountingAllocator::live; }

// What lies behind a tensor and all of its views; PyTorch's own refuses a GPU's unless it was built for GPUs.
void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  at::DataPtr data = storage->allocator()->allocate(bytes);
  const size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept) std::memcpy(data.mutable_get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
int64_t peak_bytes() { return CountingAllocator::peak; }
void reset_peak() { CountingAllocator::peak = CountingAllocator::live.load(); }

}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* pointer) const override { return pinned_memory.holds(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

TORCH_LIBRARY(fake_cuda, library) {
  library.def("host_view(Tensor tensor) -> Tensor");
  library.def("live_bytes() -> int", &live_bytes);
  library.def("resize_storage(Tensor tensor, int bytes) -> ()", &resize_storage);
  library.def("peak_bytes() -> int", &peak_bytes);
  library.def("reset_peak() -> ()", &reset_peak);
}

TORCH_LIBRARY_IMPL(fake_cuda, CUDA, library) {
  library.impl("host_view", &host_view);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("resize_", &at::native::resize_);
}
