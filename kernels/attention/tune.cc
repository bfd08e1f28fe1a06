#include "kernels/attention/tune.h"

#include <cmath>

#include "core/log.h"
#include "core/random.h"
#include "core/tensor.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/random/random.h"
#include "kernels/tuning/measure.h"

namespace tessera::kernels {
namespace {

constexpr const char* kWord = "attention";
using Fields = std::map<std::string, int64_t>;

struct NamedStrides {
  const char* name;
  HeadStrides strides;
};

std::string key_of(bool is_backward, const AttentionShape& s,
                   const std::vector<NamedStrides>& strides) {
  Fields fields = {{"backward", is_backward},    {"dtype", static_cast<int64_t>(s.dtype)},
                   {"batch", s.batch},           {"queries", s.num_queries},
                   {"keys", s.num_keys},         {"heads", s.num_heads},
                   {"kv_heads", s.num_kv_heads}, {"width", s.head_dim},
                   {"causal", s.causal}};
  for (const auto& [name, x] : strides) {
    fields[fmt::format("{}_batch", name)] = x.batch;
    fields[fmt::format("{}_time", name)] = x.time;
    fields[fmt::format("{}_head", name)] = x.head;
  }
  return key_text(kWord, fields);
}

/// Tensors like those of a key.
class Case {
 public:
  explicit Case(const Fields& fields) : fields_(fields) {
    shape_ = {.dtype = static_cast<DType>(at("dtype")),
              .batch = at("batch"),
              .num_queries = at("queries"),
              .num_keys = at("keys"),
              .num_heads = at("heads"),
              .num_kv_heads = at("kv_heads"),
              .head_dim = at("width"),
              .scale = 1 / std::sqrt(static_cast<double>(at("width"))),
              .causal = at("causal") != 0,
              .document_starts = nullptr,
              .alibi_slopes = nullptr};
  }
  bool is_backward() const { return at("backward") != 0; }

  AttentionFwd forward() {
    const auto& s = shape_;
    return {.o = make(s.dtype, o_numel()),
            .lse = make(kF32, num_rows()),
            .q = of_queries("q"),
            .k = of_keys("k"),
            .v = of_keys("v"),
            .q_strides = strides("q"),
            .k_strides = strides("k"),
            .v_strides = strides("v"),
            .shape = s};
  }
  AttentionBwd backward() {
    const AttentionFwd f = forward();
    AttentionBwd a{.dq = of_queries("dq"),
                   .dk = of_keys("dk"),
                   .dv = of_keys("dv"),
                   .accumulate_dq = false,
                   .accumulate_dk = false,
                   .accumulate_dv = false,
                   .dq_strides = strides("dq"),
                   .dk_strides = strides("dk"),
                   .dv_strides = strides("dv"),
                   .workspace = nullptr,
                   .d_out = make(shape_.dtype, o_numel()),
                   .o = f.o,
                   .lse = f.lse,
                   .q = f.q,
                   .k = f.k,
                   .v = f.v,
                   .q_strides = f.q_strides,
                   .k_strides = f.k_strides,
                   .v_strides = f.v_strides,
                   .shape = shape_,
                   .device = DeviceType::kCuda};
    a.workspace = make(kF32, a.workspace_numel());
    attention_fwd(current_stream(), f);  // a log-sum-exp that fits
    return a;
  }

 private:
  int64_t at(const std::string& name) const {
    const auto found = fields_.find(name);
    TESSERA_CHECK_AS(InternalError, found != fields_.end(), "attention: a key without {}", name);
    return found->second;
  }
  HeadStrides strides(const std::string& name) const {
    return {at(name + "_batch"), at(name + "_time"), at(name + "_head")};
  }
  int64_t num_rows() const { return shape_.batch * shape_.num_heads * shape_.num_queries; }
  int64_t o_numel() const { return num_rows() * shape_.head_dim; }
  void* make(DType dtype, int64_t numel) {
    memory_.push_back(empty({numel}, dtype));
    fill_normal(memory_.back(), 0, 1, make_key(1, memory_.size()));
    return memory_.back().raw_data();
  }
  void* of_queries(const std::string& name) {
    return make(shape_.dtype, strides(name).span(shape_.batch, shape_.num_queries, shape_.num_heads,
                                                 shape_.head_dim));
  }
  void* of_keys(const std::string& name) {
    return make(shape_.dtype, strides(name).span(shape_.batch, shape_.num_keys, shape_.num_kv_heads,
                                                 shape_.head_dim));
  }

  const Fields& fields_;
  AttentionShape shape_{};
  std::vector<Tensor> memory_;
};

template <class Args, class Own, class Cudnn>
const char* faster(const Args& a, Own own, Cudnn cudnn) {
  const Stream& s = current_stream();
  const double cudnn_ms = time_of(s, [&] { return cudnn(s, a); });
  const double own_ms = time_of(s, [&] { return own(s, a), true; });
  s.synchronize();
  return cudnn_ms < own_ms ? "cudnn" : "own";
}

}  // namespace

std::string attention_key(const AttentionFwd& a) {
  return key_of(false, a.shape, {{"q", a.q_strides}, {"k", a.k_strides}, {"v", a.v_strides}});
}
std::string attention_key(const AttentionBwd& a) {
  return key_of(true, a.shape,
                {{"q", a.q_strides},
                 {"k", a.k_strides},
                 {"v", a.v_strides},
                 {"dq", a.dq_strides},
                 {"dk", a.dk_strides},
                 {"dv", a.dv_strides}});
}

bool measure_attention(const std::string& key, Tuning::Choices& choices) {
  const Fields fields = key_fields(kWord, key);
  if (fields.empty()) return false;
  Case c(fields);
  try {
    choices[key] = c.is_backward() ? faster(c.backward(), attention_bwd, cudnn_attention_bwd)
                                   : faster(c.forward(), attention_fwd, cudnn_attention_fwd);
  } catch (const OutOfMemoryError&) {
    log_info("tuning: no memory to time \"{}\"; own kernels compute it", key);
    choices[key] = "own";
  }
  return true;
}

bool is_attention_choice(const std::string& key, const std::string& choice) {
  if (key_fields(kWord, key).empty()) return false;
  return choice == "own" || (choice == "cudnn" && cudnn_problem().empty());
}

}  // namespace tessera::kernels
