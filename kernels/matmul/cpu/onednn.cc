#include "kernels/matmul/cpu/onednn.h"

#include <omp.h>

#include <array>
#include <cstring>
#include <dnnl.hpp>
#include <memory>
#include <unordered_map>

#include "core/check.h"
#include "core/runtime/cpu/parallel.h"

// [Note: oneDNN primitives]
// A matmul primitive is compiled for a shape and for a number of threads, so both are in the key of
// the cache. The cache belongs to the thread, as the scratchpad does: no lock on the way to a
// product of a few microseconds. oneDNN keeps compiled code in a cache of the process, so a second
// thread pays little for the same shape. The matmul implementations of oneDNN (2.6) never split k
// over threads and handle each row of c alike; the tests would show a version that does not. Its
// sgemm promises neither, which is why a product goes there only in tiles of a fixed size, one
// thread each (cpu.cc).

// [Note: Weights are not packed]
// oneDNN also takes a weight in a layout of its own choice (format_tag::any), made by a reorder of
// the plain one. Measured on Zen 5 with 2.6.3, GPT-2 124M's layers, one thread, share of the plain
// product's time:
//               saved forward   saved dx     reorder, 1024 rows   reorder, 256 rows
//   f32         3 to 6 %        1 to 19 %    1 to 7 %             4 to 29 %
//   bf16        1 to 7 %        1 to 10 %    5 to 11 %            20 to 45 %
// A weight changes each optimizer step, and forward and dx want different layouts, so with one or
// two micro-batches a step packing costs what it saves; it would also hold a second and third copy
// of each weight, or a copy of each gathered unit. What it saves most where k is long (the head's
// dx, 20 to 36 %) cpu.cc has without it, by columns and tiles.

namespace tessera::kernels::cpu {
namespace {

/// What a primitive is compiled for. Compared and hashed as words, so every field is one.
struct Key {
  int64_t flags, m, n, k, lda, ldb, ldc, num_batches, batch_stride_a, batch_stride_b,
      batch_stride_c, num_threads;

  friend bool operator==(const Key&, const Key&) = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    std::array<uint64_t, sizeof(Key) / sizeof(uint64_t)> words;
    static_assert(sizeof(words) == sizeof(Key));
    std::memcpy(words.data(), &key, sizeof(Key));
    uint64_t hash = 0;
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Primitive {
  dnnl::matmul primitive;
  dnnl::memory a, b, c, bias, scratchpad;
  uint64_t last_use = 0;
};

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

/// Per thread: primitives by shape, the stream they run on and their scratchpad.
struct ThreadState {
  dnnl::stream stream{engine()};
  std::unordered_map<Key, Primitive, KeyHash> primitives;
  std::unique_ptr<std::byte[]> scratchpad;
  size_t scratchpad_nbytes = 0;
  uint64_t clock = 0;
};

dnnl::memory::data_type type_of(DType dtype) {
  return dtype == kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

/// A product too small to repay the wake-up of other threads (about 20 us) runs on one.
int threads_for(const OnednnMatmul& call) {
  if (call.one_thread) return 1;
  const double flops = 2.0 * static_cast<double>(call.m) * static_cast<double>(call.n) *
                       static_cast<double>(call.k) * static_cast<double>(call.num_batches);
  return flops < 2.5e6 ? 1 : tessera::cpu::num_threads();
}

Key key_of(const OnednnMatmul& call, int num_threads) {
  const int bias = call.bias == nullptr ? 0 : call.bias_dtype == kBF16 ? 2 : 1;
  const int64_t flags = (call.dtype == kBF16) | (call.c_dtype == kBF16) << 1 | call.trans_a << 2 |
                        call.trans_b << 3 | call.accumulate << 4 | bias << 5;
  return {flags,
          call.m,
          call.n,
          call.k,
          call.lda,
          call.ldb,
          call.ldc,
          call.num_batches,
          call.batch_stride_a,
          call.batch_stride_b,
          call.batch_stride_c,
          num_threads};
}

dnnl::memory::desc matrix(int64_t num_batches, int64_t rows, int64_t cols, DType dtype,
                          bool transposed, int64_t ld, int64_t batch_stride) {
  using Dims = dnnl::memory::dims;
  const int64_t row = transposed ? 1 : ld, col = transposed ? ld : 1;
  if (num_batches == 1) return {Dims{rows, cols}, type_of(dtype), Dims{row, col}};
  return {Dims{num_batches, rows, cols}, type_of(dtype), Dims{batch_stride, row, col}};
}

dnnl::matmul::primitive_desc describe(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                                      const dnnl::memory::desc& bias, const dnnl::memory::desc& c,
                                      const dnnl::primitive_attr& attr) {
#if DNNL_VERSION_MAJOR >= 3
  return bias.is_zero() ? dnnl::matmul::primitive_desc(engine(), a, b, c, attr)
                        : dnnl::matmul::primitive_desc(engine(), a, b, bias, c, attr);
#else
  return bias.is_zero() ? dnnl::matmul::primitive_desc({a, b, c}, attr, engine())
                        : dnnl::matmul::primitive_desc({a, b, bias, c}, attr, engine());
#endif
}

Primitive make_primitive(const OnednnMatmul& call) {
  const int64_t batches = call.num_batches;
  const dnnl::memory::desc a =
      matrix(batches, call.m, call.k, call.dtype, call.trans_a, call.lda, call.batch_stride_a);
  const dnnl::memory::desc b =
      matrix(batches, call.k, call.n, call.dtype, call.trans_b, call.ldb, call.batch_stride_b);
  const dnnl::memory::desc c =
      matrix(batches, call.m, call.n, call.c_dtype, false, call.ldc, call.batch_stride_c);
  dnnl::memory::desc bias;
  if (call.bias != nullptr) {  // one row for all
    bias = batches == 1
               ? dnnl::memory::desc({1, call.n}, type_of(call.bias_dtype), {call.n, 1})
               : dnnl::memory::desc({1, 1, call.n}, type_of(call.bias_dtype), {call.n, call.n, 1});
  }
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (call.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attr.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc desc = describe(a, b, bias, c, attr);
  Primitive made;
  made.primitive = dnnl::matmul(desc);
  made.a = dnnl::memory(a, engine(), nullptr);
  made.b = dnnl::memory(b, engine(), nullptr);
  made.c = dnnl::memory(c, engine(), nullptr);
  if (call.bias != nullptr) made.bias = dnnl::memory(bias, engine(), nullptr);
  made.scratchpad = dnnl::memory(desc.scratchpad_desc(), engine(), nullptr);
  return made;
}

Primitive& find_primitive(ThreadState& state, const OnednnMatmul& call, int num_threads) {
  const Key key = key_of(call, num_threads);
  if (const auto it = state.primitives.find(key); it != state.primitives.end()) return it->second;
  if (state.primitives.size() >= kMaxPrimitives) {
    auto oldest = state.primitives.begin();
    for (auto it = oldest; it != state.primitives.end(); ++it) {
      if (it->second.last_use < oldest->second.last_use) oldest = it;
    }
    state.primitives.erase(oldest);
  }
  Primitive made = make_primitive(call);
  // oneDNN wants 64-byte alignment; new memory is aligned to 16.
  const size_t nbytes = made.scratchpad.get_desc().get_size() + 64;
  if (state.scratchpad_nbytes < nbytes) {
    state.scratchpad = std::make_unique_for_overwrite<std::byte[]>(nbytes);
    state.scratchpad_nbytes = nbytes;
  }
  return state.primitives.emplace(key, std::move(made)).first->second;
}

/// The threads that oneDNN sees, for a scope.
class ThreadsGuard {
 public:
  explicit ThreadsGuard(int num_threads) : previous_(omp_get_max_threads()) {
    omp_set_num_threads(num_threads);
  }
  ~ThreadsGuard() { omp_set_num_threads(previous_); }
  ThreadsGuard(const ThreadsGuard&) = delete;
  ThreadsGuard& operator=(const ThreadsGuard&) = delete;

 private:
  int previous_;
};

}  // namespace

void onednn_matmul(const OnednnMatmul& call) {
  thread_local ThreadState state;
  const int num_threads = threads_for(call);
  const ThreadsGuard guard(num_threads);
  Primitive& p = find_primitive(state, call, num_threads);
  p.last_use = ++state.clock;
  p.a.set_data_handle(const_cast<void*>(call.a));
  p.b.set_data_handle(const_cast<void*>(call.b));
  p.c.set_data_handle(call.c);
  void* scratch = state.scratchpad.get();
  size_t space = state.scratchpad_nbytes;
  p.scratchpad.set_data_handle(std::align(64, 1, scratch, space));
  // The C call: the C++ one builds a hash map of arguments each time.
  std::array<dnnl_exec_arg_t, 5> args = {{{DNNL_ARG_SRC, p.a.get()},
                                          {DNNL_ARG_WEIGHTS, p.b.get()},
                                          {DNNL_ARG_DST, p.c.get()},
                                          {DNNL_ARG_SCRATCHPAD, p.scratchpad.get()},
                                          {DNNL_ARG_BIAS, nullptr}}};
  int num_args = 4;
  if (call.bias != nullptr) {
    p.bias.set_data_handle(const_cast<void*>(call.bias));
    args[static_cast<size_t>(num_args++)].memory = p.bias.get();
  }
  const dnnl_status_t status =
      dnnl_primitive_execute(p.primitive.get(), state.stream.get(), num_args, args.data());
  TESSERA_CHECK_AS(InternalError, status == dnnl_success, "matmul: oneDNN failed with status {}",
                   static_cast<int>(status));
}

bool try_onednn_matmul(const OnednnMatmul& call) noexcept {
  try {
    onednn_matmul(call);
    return true;
  } catch (...) {
    return false;
  }
}

bool onednn_has_bf16() {
  static const bool has = [] {
    const int isa = static_cast<int>(dnnl::get_effective_cpu_isa());
    const int needed = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
    return (isa & needed) == needed;
  }();
  return has;
}

bool onednn_sgemm(float* c, const float* a, const float* b, bool trans_a, bool accumulate,
                  int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc) {
  const ThreadsGuard guard(1);
  return dnnl_sgemm(trans_a ? 'T' : 'N', 'N', m, n, k, 1.0f, a, lda, b, ldb,
                    accumulate ? 1.0f : 0.0f, c, ldc) == dnnl_success;
}

}  // namespace tessera::kernels::cpu
