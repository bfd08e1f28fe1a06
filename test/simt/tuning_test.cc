#include "kernels/tuning/tuning.h"

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "dist/comm/local.h"
#include "dist/tuning.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/tune.h"
#include "kernels/matmul/matmul.h"
#include "test/simt/fake_cuda.h"
#include "test/stderr_of.h"
#include "test/temp_dir.h"
#include "test/testing.h"

// Algorithms of the fake cuBLASLt take times that a test plants, so which is the fastest is known.

namespace tessera {
namespace {

using dist::SharedTuning;
using dist::World;
using simt::GemmAlgorithm;
using testing::check_close;
using testing::error_of;
using testing::randn;
using testing::read_file;
using testing::stderr_of;
using testing::TempDir;
using testing::tol;

/// A library of such algorithms on devices with planted times, while it lives.
class Library {
 public:
  explicit Library(std::vector<GemmAlgorithm> algorithms) {
    simt::set_gemm_algorithms(std::move(algorithms));
    simt::set_planted_times(true);
    simt::take_gemm_algorithms();
  }
  ~Library() {
    simt::set_gemm_algorithms({{}});
    simt::set_planted_times(false);
    simt::set_cublaslt_version(130100);
    CHECK(simt::take_mistakes().empty());
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
};

/// A device, and a Tuning of it.
struct Tuned {
  std::shared_ptr<Context> context =
      std::make_shared<Context>(ContextOptions{.device = {DeviceType::kCuda, 0}, .num_threads = 1});
  Context::Scope context_scope{context};
  Tuning tuning;
  Tuning::Scope scope{tuning};

  /// Runs `f`, times what it wants, and runs it again: which algorithms the second run takes.
  std::vector<int> algorithms(const std::function<void()>& f) {
    f();
    tuning.add(kernels::measure_choices(tuning.wanted()));
    CHECK(tuning.wanted().empty());
    current_stream().synchronize();
    simt::take_gemm_algorithms();
    simt::take_calls();
    f();
    current_stream().synchronize();
    num_kernels = simt::take_calls()["kernel"];
    return simt::take_gemm_algorithms();
  }
  int64_t num_kernels = 0;  // of the second run
};

using Indices = std::vector<int>;

/// [16, 32] times [32, 24], `shift` elements behind an address of the widest alignment.
void multiply(DType dtype, int64_t shift = 0) {
  const Tensor a = randn({16 * 32 + shift}, dtype, 1).narrow(0, shift, 16 * 32).view({16, 32});
  matmul(a, randn({32, 24}, dtype, 2));
}

TEST_CASE("simt tuning: the fastest algorithm that the library takes is chosen",
          "[matmul][cuda][simt]") {
  const Library library({{.ms = 30},
                         {.ms = 5, .takes_f32 = false},
                         {.ms = 2, .takes_f32 = false, .min_alignment = 16},
                         {.ms = 10},
                         {.ms = 1, .fails = true},                             // when it is to run
                         {.ms = 0.5, .workspace_nbytes = size_t{64} << 20}});  // more than is given
  Tuned on;
  CHECK(on.algorithms([] { multiply(kBF16); }) == Indices{2});
  CHECK(on.algorithms([] { multiply(kBF16, 1); }) == Indices{1});
  CHECK(on.algorithms([] { multiply(kF16); }) == Indices{2});
  CHECK(on.algorithms([] { multiply(kF32); }) == Indices{3});
}

TEST_CASE("simt tuning: epilogues are fused where that is faster", "[matmul][cuda][simt]") {
  struct Times {
    GemmAlgorithm first, second;
    bool is_fused;
    int linear;  // the fastest without an epilogue
  };
  // A kernel takes 1 ms: the activation is one, the sums of a bias's gradient are two.
  const std::vector<Times> cases = {
      {{.ms = 10, .epilogue_ms = 0.5}, {.ms = 12}, true, 0},
      {{.ms = 10, .epilogue_ms = 3}, {.ms = 20}, false, 0},
      {{.ms = 10, .epilogue_ms = 0.5}, {.ms = 2, .takes_epilogues = false}, false, 1},
  };
  for (const auto& [first, second, is_fused, linear] : cases) {
    INFO(first.epilogue_ms << " " << second.ms);
    const Library library({first, second});
    Tuned on;
    const Tensor x = randn({16, 32}, kBF16, 1).set_requires_grad(true);
    const Tensor w = randn({24, 32}, kBF16, 2).set_requires_grad(true);
    const Tensor bias = randn({24}, kBF16, 3).set_requires_grad(true);
    const int fused = 0;
    CHECK(on.algorithms([&] { linear_gelu(x, w, bias, Gelu::kTanh); }) ==
          Indices{is_fused ? fused : linear});
    CHECK(on.num_kernels == (is_fused ? 0 : 1));
    const Tensor dy = randn({16, 24}, kBF16, 4);
    // The gradients of x and w, then that of the bias.
    CHECK(on.algorithms([&] {
      for (Tensor t : {x, w, bias}) t.set_grad({});
      backward(tessera::linear(x, w, bias), dy);
    }) == Indices({linear, linear, is_fused ? fused : linear}));
    CHECK(on.num_kernels == (is_fused ? 0 : 2));
  }
}

TEST_CASE("simt tuning: what is computed is the same, whatever is chosen", "[matmul][cuda][simt]") {
  const auto run = [] {
    const auto leaf = [](const Shape& shape, uint64_t seed) {
      return randn(shape, kF32, seed).set_requires_grad(true);
    };
    const Tensor x = leaf({16, 32}, 1), w = leaf({24, 32}, 2), bias = leaf({24}, 3);
    const Tensor y = linear_gelu(x, w, bias, Gelu::kTanh);
    backward(y, randn(y.shape(), kF32, 4));
    return std::vector<std::vector<double>>{y.to_vector(), x.grad().to_vector(),
                                            w.grad().to_vector(), bias.grad().to_vector()};
  };
  const auto expected = [&] {
    const auto context = std::make_shared<Context>(ContextOptions{.num_threads = 1});
    const Context::Scope scope(context);
    return run();
  }();
  for (const double epilogue_ms : {0.0, 9.0}) {
    const Library library({{.ms = 9}, {.ms = 3, .epilogue_ms = epilogue_ms, .order = 2}});
    Tuned on;
    const auto untuned = run();
    on.algorithms([&] { run(); });
    const auto tuned = run();
    CHECK(tuned == run());
    CHECK(tuned != untuned);  // they add in other orders
    for (size_t i = 0; i < expected.size(); ++i)
      check_close(tuned[i], expected[i], tol(kF32, 64), fmt::format("result {}", i));
  }
}

TEST_CASE("simt tuning: our own kernel computes what the library refuses each time it is to run",
          "[matmul][cuda][simt]") {
  const Library library({{.ms = 1, .fails = true}, {.ms = 2, .fails = true}});
  Tuned on;
  const Tensor a = randn({16, 32}, kBF16, 1), b = randn({32, 24}, kBF16, 2);
  // Proposed and refused: an error as long as nothing is timed.
  CHECK_THAT(error_of([&] { matmul(a, b); }), Catch::Contains("CUBLAS_STATUS_NOT_SUPPORTED"));
  on.tuning.add(kernels::measure_choices(on.tuning.wanted()));
  const std::vector<double> actual = matmul(a, b).to_vector();
  set_gemm_backend(GemmBackend::kOwn);
  CHECK(actual == matmul(a, b).to_vector());
}

TEST_CASE("simt tuning: without memory to time it a product stays as it is proposed",
          "[matmul][cuda][simt]") {
  const Library library({{.ms = 9}, {.ms = 1}});
  simt::set_device_capacity(int64_t{24} << 20);  // of which a workspace takes 32 MiB
  Indices used;
  const std::string text = stderr_of([&] {
    Tuned on;
    used = on.algorithms([] { multiply(kBF16); });
  });
  simt::set_device_capacity(int64_t{4} << 30);
  CHECK(used == Indices{0});
  CHECK_THAT(text, Catch::Contains("tuning: no memory to time \"gemm "));
}

TEST_CASE("simt tuning: shapes that never repeat are not timed for ever", "[matmul][cuda][simt]") {
  Tuning tuning;
  for (size_t i = 0; i < 2 * Tuning::kMaxKeys; ++i)
    tuning.find_or_want(fmt::format("gemm m={}", i));
  CHECK(tuning.wanted().size() == Tuning::kMaxKeys);
}

TEST_CASE("simt tuning: a key that nobody makes is an error", "[matmul][cuda][simt]") {
  Tuned on;
  CHECK_THAT(error_of([] { kernels::measure_choices({"convolution m=3"}); }),
             Catch::Contains("tuning: nobody knows the key \"convolution m=3\""));
  CHECK_THAT(error_of([] { kernels::measure_choices({"gemm m=3"}); }),
             Catch::Contains("matmul: a key without "));
  CHECK(!kernels::is_choice("gemm m=3", "own"));
  CHECK(!kernels::is_choice("gemm m=", "own"));
}

// ----- ranks, and the file

constexpr int kRanks = 3;

dist::LocalOptions on_devices() {
  dist::LocalOptions options;
  options.context.device = {DeviceType::kCuda, 0};
  return options;
}

/// What a rank sees.
struct Seen {
  std::vector<std::vector<double>> steps;  // a product after each step
  Tuning::Choices choices;
};

/// Two steps on each rank, timed in between. The last rank has a shape of its own.
std::vector<Seen> run_ranks(const std::string& file, int num_steps = 2) {
  std::vector<Seen> seen(kRanks);
  dist::run_ranks(kRanks, on_devices(), [&](World& world) {
    SharedTuning tuning(world, file);
    Seen& mine = seen[static_cast<size_t>(world.rank())];
    for (int step = 0; step < num_steps; ++step) {
      const Tensor y = matmul(randn({16, 64}, kF32, 1), randn({64, 24}, kF32, 2));
      mine.steps.push_back(y.to_vector());
      if (world.rank() == kRanks - 1) multiply(kF16);
      tuning.update();
    }
    if (Tuning::current() != nullptr) mine.choices = Tuning::current()->choices();
  });
  return seen;
}

/// Two algorithms: the second is the faster on the first device alone.
std::vector<GemmAlgorithm> uneven() {
  return {{.ms = 10, .order = 30}, {.ms = 5, .device_ms = 8, .order = 2}};
}

TEST_CASE("simt tuning: rank 0 chooses for all ranks, and for shapes that it never meets",
          "[matmul][cuda][simt]") {
  const Library library(uneven());
  const TempDir dir;
  const std::vector<Seen> seen = run_ranks(dir / "tuning.txt");
  CHECK(seen[0].choices.size() == 2);
  CHECK(seen[0].steps[0] != seen[0].steps[1]);  // another algorithm, with bits of its own
  for (const Seen& rank : seen) {
    CHECK(rank.choices == seen[0].choices);
    CHECK(rank.steps == seen[0].steps);
  }
}

TEST_CASE("simt tuning: runs with the file of another have its bits from the first step on",
          "[matmul][cuda][simt]") {
  const TempDir dir;
  const std::string file = dir / "tuning.txt";
  std::vector<Seen> first, second;
  {
    const Library library(uneven());
    first = run_ranks(file);
    CHECK_THAT(read_file(file),
               Catch::Contains("tessera tuning 1\n[Fake device (9.0); cuBLASLt 130100; "));
  }
  const std::string written = read_file(file);
  // Today the first one would be chosen.
  std::vector<GemmAlgorithm> others = uneven();
  others[0].ms = 1;
  const Library library(others);
  CHECK(stderr_of([&] { second = run_ranks(file); }).empty());
  CHECK(second[0].choices == first[0].choices);
  for (const Seen& rank : second) {
    CHECK(rank.steps[0] == first[0].steps[1]);
    CHECK(rank.steps[1] == first[0].steps[1]);
  }
  CHECK(read_file(file) == written);
}

TEST_CASE("simt tuning: a file of another device or library is named, and kept beside new choices",
          "[matmul][cuda][simt]") {
  const TempDir dir;
  const std::string file = dir / "tuning.txt";
  const Library library(uneven());
  run_ranks(file);
  std::vector<Seen> seen;
  simt::set_cublaslt_version(130200);
  CHECK_THAT(stderr_of([&] { seen = run_ranks(file); }),
             Catch::Contains("tuning: " + file + " is of Fake device (9.0); cuBLASLt 130100; ") &&
                 Catch::Contains(", this is Fake device (9.0); cuBLASLt 130200; ") &&
                 Catch::Contains("; its choices are made anew"));
  CHECK(seen[1].choices.size() == 2);
  for (int device = 0; device < kRanks; ++device) simt::set_device_name(device, "Other");
  CHECK_THAT(
      stderr_of([&] { seen = run_ranks(file); }),
      Catch::Contains(", nor ") && Catch::Contains(", this is Other (9.0); cuBLASLt 130200"));
  for (int device = 0; device < kRanks; ++device) simt::set_device_name(device, "Fake device");
  // All three are there.
  CHECK(stderr_of([&] { run_ranks(file); }).empty());
  simt::set_cublaslt_version(130100);
  CHECK(stderr_of([&] { run_ranks(file); }).empty());
}

TEST_CASE("simt tuning: a damaged file is named and made anew", "[matmul][cuda][simt]") {
  const TempDir dir;
  const std::string file = dir / "tuning.txt";
  const Library library(uneven());
  const std::vector<Seen> first = run_ranks(file);
  const std::string whole = read_file(file);
  std::string flipped = whole;
  flipped[flipped.find("fused") + 20] ^= 1;
  for (const auto& [text, problem] : std::vector<std::pair<std::string, std::string>>{
           {flipped, "its checksum is "},
           {whole.substr(0, whole.size() / 2), "its last line has no checksum"},
           {whole + "more\n", "its checksum is "}}) {
    dir.write("tuning.txt", text);
    std::vector<Seen> seen;
    CHECK_THAT(stderr_of([&] { seen = run_ranks(file); }),
               Catch::Contains("tuning: " + file + " is damaged: " + problem) &&
                   Catch::Contains("; it is made anew"));
    CHECK(seen[0].choices == first[0].choices);
    CHECK(read_file(file) == whole);
  }
}

TEST_CASE("simt tuning: choices that the library does not take are made anew",
          "[matmul][cuda][simt]") {
  const TempDir dir;
  const std::string file = dir / "tuning.txt";
  {
    const Library library(uneven());
    run_ranks(file);
  }
  const Library library({{.ms = 10}, {.ms = 5, .takes_f32 = false}});
  std::vector<Seen> seen;
  CHECK_THAT(stderr_of([&] { seen = run_ranks(file); }),
             Catch::Contains("tuning: " + file + ": the libraries do not take 1 of its choices"));
  CHECK(seen[0].choices.size() == 2);
  CHECK(stderr_of([&] { run_ranks(file); }).empty());
}

TEST_CASE("simt tuning: a file of something else is not replaced", "[matmul][cuda][simt]") {
  const Library library(uneven());
  const TempDir dir;
  const std::string text = "[train]\nsteps = 3\n", file = dir.write("config.toml", text);
  CHECK(error_of([&] { run_ranks(file); }) ==
        "tuning: " + file +
            " is not a file of tuned choices (its first line is \"[train]\", expected \"tessera "
            "tuning 1\"); name one that is, or that is not there yet");
  CHECK(read_file(file) == text);
}

TEST_CASE("simt tuning: a file that cannot be written ends no run", "[matmul][cuda][simt]") {
  const Library library(uneven());
  const TempDir dir;
  std::vector<Seen> seen;
  const std::string text = stderr_of([&] { seen = run_ranks(dir / "nowhere/tuning.txt", 3); });
  CHECK_THAT(text, Catch::Contains("; the choices of this run are not kept"));
  CHECK(seen[0].steps[2] == seen[0].steps[1]);
  CHECK(seen[0].choices.size() == 2);
}

TEST_CASE("simt tuning: ranks on different devices are not tuned", "[matmul][cuda][simt]") {
  const Library library(uneven());
  const TempDir dir;
  simt::set_device_name(1, "Other");
  std::vector<Seen> seen;
  const std::string text = stderr_of([&] { seen = run_ranks(dir / "tuning.txt"); });
  simt::set_device_name(1, "Fake device");
  CHECK_THAT(text, Catch::Contains("tuning: rank 0 is Fake device (9.0); ") &&
                       Catch::Contains(", rank 1 is Other (9.0); ") &&
                       Catch::Contains("; nothing is tuned"));
  for (const Seen& rank : seen) {
    CHECK(rank.choices.empty());
    CHECK(rank.steps[0] == rank.steps[1]);
  }
}

TEST_CASE("simt tuning: without a file no GEMM is timed", "[matmul][cuda][simt]") {
  const Library library(uneven());
  const std::vector<Seen> seen = run_ranks("");
  CHECK(seen[0].choices.empty());
  CHECK(simt::take_gemm_algorithms() == Indices(2 * kRanks + 2, 0));
}

}  // namespace
}  // namespace tessera
