// A torch device in host memory: an allocator whose limit is shared by all processes (capacity.h), and the CPU's kernels run
// on the same bytes. It is the PrivateUse1 device type, which Python names npu.
#include "capacity.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kCard = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

CapacityFile file;
thread_local c10::DeviceIndex current = 0;

// The device that this thread allocates on, for the time of a scope.
struct On {
  explicit On(c10::DeviceIndex index) : before(current) { current = index < 0 ? before : index; }
  explicit On(const std::optional<at::Device>& d) : On(d ? d->index() : c10::DeviceIndex(-1)) {}
  ~On() { current = before; }
  c10::DeviceIndex before;
};

// ---- memory ------------------------------------------------------------------

struct Block { void* p; size_t n; int card; };

void release(void* context) {
  auto* b = static_cast<Block*>(context);
  try {
    file.release(b->card, b->n);
  } catch (const std::exception& e) {   // torch frees where nothing may be thrown
    std::fprintf(stderr, "%s\n", e.what());
  }
  std::free(b->p);
  delete b;
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const int card = current;
    CapacityFile::Full full{};
    if (!file.allocate(card, n, &full)) {
      const double mib = 1 << 20;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", full.requested / mib, " MiB. Virtual card ", card,
                       " has a total capacity of ", full.size / mib, " MiB of which ", full.free / mib, " MiB is free.");
    }
    void* p = n ? std::aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    return {p, new Block{p, n, card}, &release, c10::Device(kCard, c10::DeviceIndex(card))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

CardAllocator allocator;

// ---- the device ----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kCard;
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {kCard, current}; }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.has_index()) current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(file.cards()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    On on(s.device().index());
    auto p = allocator.allocate(n);
    if (s.nbytes()) std::memcpy(p.get(), s.data(), std::min(n, s.nbytes()));
    s.set_data_ptr_noswap(std::move(p));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

// ---- the CPU's kernels on card memory --------------------------------------------

bool on_card(const at::Tensor& t) { return t.defined() && t.device().type() == kCard; }

at::Tensor as_cpu(const at::Tensor& t) {
  if (!on_card(t)) return t;
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

at::Tensor to_card(const at::Tensor& t) {
  at::Tensor out = at::detail::empty_strided_generic(t.sizes(), t.strides(), &allocator, kKeys, t.scalar_type());
  as_cpu(out).copy_(t);
  return out;
}

[[noreturn]] void complain(const std::string& one, const std::string& other, const std::string& what) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, "! (virtual card, ", what, ")");
  std::abort();
}

void check_same(const std::string& what, std::initializer_list<at::Tensor> tensors) {
  const at::Tensor* first = nullptr;
  for (auto& t : tensors) {
    if (!t.defined()) continue;
    if (!first) first = &t;
    else if (t.device() != first->device()) complain(first->device().str(), t.device().str(), what);
  }
}

struct Arg { at::Tensor original, alias; };

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<Arg> args;
  bool cpu = false;
  std::optional<c10::Device> wanted;
  auto take = [&](const at::Tensor& t, bool index = false) -> at::Tensor {
    if (!t.defined()) return t;
    if (!on_card(t)) { cpu |= t.dim() > 0 && !index; return t; }
    if (!args.empty() && args[0].original.device() != t.device()) complain(args[0].original.device().str(), t.device().str(), schema.name());
    // An empty operand may be an out= that the kernel grows: give it room to.
    args.push_back({t, t.numel() ? as_cpu(t) : at::empty(t.sizes(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU))});
    return args.back().alias;
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[first + i];
    if (v.isTensor()) {
      v = take(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor t : v.toTensorList()) l.push_back(take(t));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const std::optional<at::Tensor> t : v.toOptionalTensorList()) l.push_back(t ? std::optional<at::Tensor>(take(*t, true)) : t);
      v = l;
    } else if (v.isDevice()) {
      if (v.toDevice().type() == kCard) wanted = v.toDevice();
      v = c10::Device(at::kCPU);
    }
  }
  const auto& name = schema.name();
  if (cpu && !args.empty()) complain(args[0].original.device().str(), "cpu", name);
  On on(wanted ? wanted->index() : args.empty() ? c10::DeviceIndex(-1) : args[0].original.device().index());

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  auto back = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined() || on_card(t)) return t;
    for (auto& a : args)
      if (a.alias.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) {     // written in place
        if (a.original.sizes() != t.sizes()) {                           // and resized on the way
          a.original.resize_(t.sizes());
          as_cpu(a.original).copy_(t);
        }
        return a.original;
      }
    const auto* p = static_cast<const char*>(t.const_data_ptr());
    for (auto& a : args) {                                               // a view
      const auto& s = a.original.storage();
      const auto* base = static_cast<const char*>(s.data());
      if (p && p >= base && p < base + s.nbytes() && a.original.dtype() == t.dtype())
        return a.original.as_strided(t.sizes(), t.strides(), (p - base) / t.element_size());
    }
    return to_card(t);
  };
  const size_t m = schema.returns().size(), at0 = stack->size() - m;
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[at0 + i];
    if (v.isTensor()) {
      v = back(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor t : v.toTensorList()) l.push_back(back(t));
      v = l;
    }
  }
}

// ---- what every backend must bring -------------------------------------------------

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, kKeys, at::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, kKeys, at::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> off) {
  std::optional<int64_t> o;
  if (off) o = off->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), o);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  as_cpu(dst).copy_(as_cpu(self));
  return dst;
}
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool) {
  as_cpu(self).copy_(as_cpu(src));
  return self;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  as_cpu(dst).copy_(as_cpu(self));
  return dst;
}
at::Scalar item(const at::Tensor& self) { return as_cpu(self).item(); }
at::Tensor& set_storage(at::Tensor& self, at::Storage s, c10::SymInt off, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
  self.unsafeGetTensorImpl()->set_storage_offset(off.expect_int());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage s) {
  const auto n = static_cast<int64_t>(s.nbytes() / self.dtype().itemsize());
  return set_storage(self, s, 0, c10::fromIntArrayRefSlow({n}), c10::fromIntArrayRefSlow({1}));
}
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef pad, c10::SymIntArrayRef dil, bool transposed, c10::SymIntArrayRef outpad, c10::SymInt groups) {
  const at::Tensor bias = b ? *b : at::Tensor();
  check_same("aten::convolution", {x, w, bias});
  On on(x.device().index());
  std::optional<at::Tensor> cpu_bias;
  if (bias.defined()) cpu_bias = as_cpu(bias);
  return to_card(at::convolution(as_cpu(x), as_cpu(w), cpu_bias, C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(pad),
                                 C10_AS_INTARRAYREF_SLOW(dil), transposed, C10_AS_INTARRAYREF_SLOW(outpad), groups.expect_int()));
}

} // namespace

namespace at { // the guard registry wants this namespace
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("convolution_overrideable", &convolution);
  // The generic kernels of these trip over channels-last operands or, for attention, ask a table that has no entry for this device.
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kCard, &allocator);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("open", [](const std::string& path) { file.open(path); });
  m.def("set_device", [](int index) { current = c10::DeviceIndex(index); });
  m.def("current_device", [] { return int(current); });
}
