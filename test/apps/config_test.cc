#include "apps/config.h"

#include "apps/config_table.h"
#include "nn/llama/llama.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

struct Case {
  const char* toml;
  std::vector<std::string> overrides;
  const char* message;
};

const std::string kText = "--data.text=x";

}  // namespace

TEST_CASE("config: what is wrong is named with key, place and what is allowed", "[config]") {
  const Case cases[] = {
      {"[model]\nlayer = 3",
       {},
       "f.toml:2: unknown key model.layer, expected a known one (nearest: model.layers)"},
      {"[train]\nmicro_batch = 1048576\n[model]\ncontext = 16777216",
       {"--data.text=x"},
       "f.toml:2: train.micro_batch = 1048576 with model.context = 16777216, expected at "
       "most "
       "2147483647 tokens in a pass"},
      {"",
       {"--data.text=x", "--model.ignore_keys=a,b"},
       "command line: model.ignore_keys = \"a,b\" without model.from, expected the model that has "
       "them"},
      {"[modle]\nlayers = 3",
       {},
       "f.toml:1: unknown section [modle], expected a known one (nearest: model)"},
      {"[a.b]\nc = 1", {}, "f.toml:1: unknown section [a], expected a known one (nearest: lora)"},
      {"[\"\"]\nc = 1", {}, "f.toml:1: unknown section [], expected a known one (nearest: dpo)"},
      {"devise = 'cpu'",
       {},
       "f.toml:1: unknown key devise, expected a known one (nearest: device)"},
      {"model = 3", {}, "f.toml:1: model is a section, expected [model]"},
      {"[model.layers]\nx = 3",
       {},
       "f.toml:1: model.layers = a table, expected an integer in [1, 10000]"},
      {"\n[model]\nlayers = 'two'",
       {},
       "f.toml:3: model.layers = \"two\", expected an integer in [1, 10000]"},
      {"[model]\nlayers = 2.0",
       {},
       "f.toml:2: model.layers = 2.0, expected an integer in [1, 10000]"},
      {"[model]\nlayers = -1",
       {},
       "f.toml:2: model.layers = -1, expected an integer in [1, 10000]"},
      {"[model]\nlayers = 2147483648",
       {},
       "f.toml:2: model.layers = 2147483648, expected an integer in [1, 10000]"},
      {"[model]\nheads = 0", {}, "f.toml:2: model.heads = 0, expected an integer in [1, 4096]"},
      {"[model]\ntied = 1", {}, "f.toml:2: model.tied = 1, expected true or false"},
      {"[model]\nkind = 'lama'",
       {},
       "f.toml:2: model.kind = \"lama\", expected one of llama, gpt2, bloom, bert (nearest: llama)"},
      {"[model]\ndropout = 1.0", {}, "f.toml:2: model.dropout = 1.0, expected a number in [0, 1)"},
      {"[optim]\nlr = nan", {}, "f.toml:2: optim.lr = nan, expected a number >= 0"},
      {"[optim]\nlr = inf", {}, "f.toml:2: optim.lr = inf, expected a finite number >= 0"},
      {"[optim]\nlr = [1.0]", {}, "f.toml:2: optim.lr = an array, expected a number >= 0"},
      {"[optim]\neps = 0", {}, "f.toml:2: optim.eps = 0, expected a number > 0"},
      {"device = 3", {}, "f.toml:1: device = 3, expected one of auto, cpu, cuda"},
      {"[fsdp]\nstrategy = 'full_sharding'",
       {},
       "f.toml:2: fsdp.strategy = \"full_sharding\", expected one of full_shard, shard_grad_op, "
       "shard_optim, no_shard, hybrid_shard, hybrid_shard_zero2 (nearest: full_shard)"},
      {"[kernels]\nattention = 'flash'",
       {},
       "f.toml:2: kernels.attention = \"flash\", expected one of own, cudnn, auto (nearest: own)"},
      {"[kernels]\ngemm = 'cublas'",
       {},
       "f.toml:2: kernels.gemm = \"cublas\", expected one of auto, own, cublaslt (nearest: "
       "cublaslt)"},
      {"[fsdp]\nsync_every_micro_batch = 1",
       {},
       "f.toml:2: fsdp.sync_every_micro_batch = 1, expected one of auto, true, shard, false"},
      {"[fsdp]\nwrap = true",
       {},
       "f.toml:2: fsdp.wrap = true, expected one of transformer_block, every_n_blocks, "
       "min_num_params, class, whole_model"},
      {"[model]\nwidth = 100\nheads = 3",
       {kText},
       "f.toml:2: model.width = 100, expected a multiple of heads = 3"},
      {"[model]\nwidth = 12\nheads = 4",
       {kText},
       "f.toml:2: model.width = 12, expected heads of an even width (rotary positions), not 3"},
      {"[model]\nrope_scaling = 'llama3'\nrope_low_freq_factor = 4",
       {kText},
       "f.toml:3: model.rope_low_freq_factor = 4.0, expected less than rope_high_freq_factor = 4"},
      {"[model]\nnorm_eps = 1e-300",
       {},
       "f.toml:2: model.norm_eps = 1e-300, expected a number in [1e-30, 1e+30]"},
      {"[model]\nwidth = 1032\nheads = 4",
       {kText},
       "f.toml:2: model.width = 1032, expected heads of a width of at most 256"},
      {"[model]\nkind = 'gpt2'\nwidth = 257\nheads = 1",
       {kText},
       "f.toml:3: model.width = 257, expected heads of a width of at most 256"},
      {"[model]\nhead_width = 258",
       {kText},
       "f.toml:2: model.head_width = 258, expected heads of a width of at most 256"},
      {"[model]\nkv_heads = 3",
       {kText},
       "f.toml:2: model.kv_heads = 3, expected a divisor of heads = 4"},
      {"[model]\nkind = 'gpt2'\nkv_heads = 2",
       {kText},
       "f.toml:3: model.kv_heads = 2, expected model.heads = 4 for kind gpt2"},
      {"[model]\nkind = 'bert'",
       {kText},
       "default: data.mask_token = -1, expected the id of the mask token for kind bert, which "
       "predicts masked tokens"},
      {"[model]\nkind = 'bert'\n[data]\nmask_token = 3\n[sample]\ntokens = 5",
       {kText},
       "f.toml:6: sample.tokens = 5, expected 0 for kind bert, which cannot continue a text"},
      {"[data]\nmask_token = 7",
       {kText},
       "f.toml:2: data.mask_token = 7, expected -1 for kind llama, which predicts the next token"},
      {"[model]\nkind = 'gpt2'\nwindow = 8",
       {kText},
       "f.toml:3: model.window = 8, expected 0 for kind gpt2"},
      {"[model]\nkind = 'bloom'\nlogit_softcap = 30.0",
       {kText},
       "f.toml:3: model.logit_softcap = 30.0, expected 0.0 for kind bloom"},
      {"[model]\nkind = 'gpt2'\nattn_softcap = 50.0",
       {kText},
       "f.toml:3: model.attn_softcap = 50.0, expected 0.0 for kind gpt2"},
      {"[model]\nwindow = 8\nwindow_layers = 'wx'",
       {kText},
       "f.toml:3: model.window_layers = \"wx\", expected letters w and f, such as wf"},
      {"[model]\nkind = 'bloom'\ngelu = 'exact'",
       {kText},
       "f.toml:3: model.gelu = \"exact\", expected \"tanh\" for kind bloom"},
      {"[model]\nkind = 'bloom'\nffn = 100",
       {kText},
       "f.toml:3: model.ffn = 100, expected 0 or 4 x model.width for kind bloom"},
      {"[model]\nkind = 'gpt2'\nqk_norm = true",
       {kText},
       "f.toml:3: model.qk_norm = true, expected false for kind gpt2"},
      {"[model]\nkind = 'gpt2'\nhead_width = 8",
       {kText},
       "f.toml:3: model.head_width = 8, expected 0 for kind gpt2"},
      {"[model]\ndropout = 0.1",
       {kText},
       "f.toml:2: model.dropout = 0.1, expected 0.0 for kind llama"},
      {"[optim]\nfinal_lr = 1.0",
       {kText},
       "f.toml:2: optim.final_lr = 1, expected at most optim.lr = 0.001"},
      {"[optim]\nstochastic_rounding = true",
       {kText, "--precision.param_dtype=f32"},
       "f.toml:2: optim.stochastic_rounding = true with precision.param_dtype = f32, expected bf16 "
       "or f16"},
      {"[model]\neos_ids = '2,-1'",
       {kText},
       "f.toml:2: model.eos_ids = \"2,-1\", expected token ids, such as 2 or 2,7"},
      {"[model]\npad_ids = '2,'",
       {kText},
       "f.toml:2: model.pad_ids = \"2,\", expected token ids, such as 2 or 2,7"},
      {"[train]\nglobal_batch = 12",
       {kText},
       "f.toml:2: train.global_batch = 12, expected a multiple of train.micro_batch = 8"},
      {"[train]\nglobal_batch = 16\ngrad_accum_steps = 2",
       {kText},
       "f.toml:3: train.grad_accum_steps = 2, expected it left out where train.global_batch is "
       "set"},
      {"",
       {},
       "data: no data given, expected one of --data.text=FILE, --data.tokens=GLOB, "
       "--data.sources=GLOB,..., --data.chat=GLOB, --data.preference=GLOB or --data.classify=GLOB"},
      {"",
       {kText, "--data.tokens=y"},
       "data: both text and tokens given, expected one of --data.text=FILE, --data.tokens=GLOB, "
       "--data.sources=GLOB,..., --data.chat=GLOB, --data.preference=GLOB or --data.classify=GLOB"},
      {"",
       {kText, "--data.sources=y"},
       "data: both text and sources given, expected one of --data.text=FILE, --data.tokens=GLOB, "
       "--data.sources=GLOB,..., --data.chat=GLOB, --data.preference=GLOB or --data.classify=GLOB"},
      {"",
       {"--data.tokens=y"},
       "command line: data.tokens without a vocabulary, expected model.vocab to be set"},
      {"[eval]\ntasks = 'boolq=x'",
       {kText},
       "f.toml:2: eval.tasks: boolq=x, expected FORM=FILE with one of hellaswag, arc, mmlu, piqa, "
       "lambada, winogrande, choice, generate, text"},
      {"[eval]\ntasks = 'piqa=x'\n[data]\nclassify = 'x'",
       {},
       "f.toml:2: eval.tasks with data.classify, expected a model that predicts the next token"},
      {"[eval]\ntasks = 'piqa=x'\n[model]\nkind = 'bert'\n[data]\nmask_token = 3",
       {kText},
       "f.toml:2: eval.tasks with kind bert, expected a model that predicts the next token"},
      {"[eval]\ntasks = 'piqa=x'\n[data]\ntokens = 'y'\n[model]\nvocab = 9",
       {},
       "f.toml:2: eval.tasks with data.tokens, expected eval.tokenizer, the one of their ids"},
      {"[data]\nclassify = 'x'\nseparator = 3",
       {},
       "f.toml:3: data.separator = 3 with data.classify, expected none"},
      {"[data]\nclassify = 'x'\nmask_token = 3",
       {},
       "f.toml:3: data.mask_token with data.classify, expected data.tokens"},
      {"[data]\nclassify = 'x'\n[sample]\ntokens = 5",
       {},
       "f.toml:4: sample.tokens = 5, expected 0 for data.classify, which cannot continue a text"},
      {"[model]\nclasses = 'a,b'",
       {kText},
       "f.toml:2: model.classes = a,b with data.text, expected data.classify"},
      {"[model]\nclasses = 'a'\n[data]\nclassify = 'x'",
       {},
       "f.toml:2: model.classes = \"a\": one class, expected two or more"},
      {"[model]\nclasses = 'a,b,a'\n[data]\nclassify = 'x'",
       {},
       "f.toml:2: model.classes = \"a,b,a\": a twice, expected each class once"},
      {"[model]\nclasses = 'a,'\n[data]\nclassify = 'x'",
       {},
       "f.toml:2: model.classes = \"a,\": an empty name, expected names between commas"},
      {"[data]\ntext = 'x'\nval_tokens = 'y'",
       {},
       "f.toml:3: data.val_tokens with data.text, expected data.tokens"},
      {"[data]\nchat = 'x'\nval_tokens = 'y'",
       {},
       "f.toml:3: data.val_tokens with data.chat, expected data.tokens"},
      {"[data]\nchat = 'x'\nmask_token = 3",
       {},
       "f.toml:3: data.mask_token with data.chat, expected data.tokens"},
      {"[data]\nchat = 'x'\nseparator = 3",
       {},
       "f.toml:3: data.separator = 3 with data.chat, expected none: its template says what ends a "
       "conversation"},
      {"[data]\nrestart_positions = true",
       {"--data.tokens=y", "--model.vocab=9"},
       "f.toml:2: data.restart_positions = true, expected data.separator to be set"},
      {"[sample]\ntokens = 5",
       {"--data.tokens=y", "--model.vocab=9"},
       "f.toml:2: sample.tokens = 5 with data.tokens, expected 0 or data.text, which has a "
       "tokenizer"},
      {"[sample]\ntokens = 5\nprompt = ''",
       {kText},
       "f.toml:3: sample.prompt is empty, expected some text"},
      {"[memory]\nlimit = '2 gigs'",
       {kText},
       "f.toml:2: memory.limit: \"2 gigs\" is not a number of bytes such as \"512MiB\", \"2GiB\" "
       "or "
       "\"none\""},
      {"",
       {"--train.step=3"},
       "command line: unknown key train.step, expected a known one (nearest: train.steps)"},
      {"[optim]\nclip_p = 1000",
       {kText},
       "f.toml:2: optim.clip_p = 1000, expected at most 16, whose powers f64 can hold, or inf"},
      {"[optim]\nclip_p = 0.5", {kText}, "f.toml:2: optim.clip_p = 0.5, expected a number >= 1"},
      {"[model]\nmax_positions = 8\ncontext = 16",
       {kText},
       "f.toml:2: model.max_positions = 8, expected 0 or at least model.context = 16"},
      {"",
       {"--checkpoint.resume"},
       "command line: --resume without a value, expected auto, none or the path of a checkpoint"},
      {"",
       {"--train.steps=1e18"},
       "command line: train.steps = \"1e18\", expected an integer >= 1"},
      {"",
       {"--train.steps=1e-1"},
       "command line: train.steps = \"1e-1\", expected an integer >= 1"},
      {"", {"--train.steps=inf"}, "command line: train.steps = \"inf\", expected an integer >= 1"},
      {"", {"--train.steps=-1e3"}, "command line: train.steps = -1e3, expected an integer >= 1"},
      {"", {"--train.steps=3.5"}, "command line: train.steps = \"3.5\", expected an integer >= 1"},
      {"", {"--train.steps=0"}, "command line: train.steps = 0, expected an integer >= 1"},
      {"",
       {"--train.steps=9223372036854775807"},
       "command line: train.steps = 9223372036854775807, expected an integer >= 1 and <= "
       "1000000000000"},
      {"",
       {"--dist.timeout=0.0001"},
       "command line: dist.timeout = 0.0001, expected a number in [0.001, 1000000000]"},
      {"",
       {"--output.dir", "--train.steps=2"},
       "command line: --output.dir without a value, expected a string"},
      {"", {"--train.steps="}, "command line: train.steps = \"\", expected an integer >= 1"},
      {"",
       {"--train.steps"},
       "command line: --train.steps without a value, expected an integer >= 1"},
      {"", {"--optim.lr=nan"}, "command line: optim.lr = nan, expected a number >= 0"},
      {"", {"--model.tied=yes"}, "command line: model.tied = \"yes\", expected true or false"},
      {"", {"train.steps=3"}, "command line: \"train.steps=3\", expected --section.key=value"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.toml);
    CHECK(error_of([&] { parse_config(c.toml, "f.toml", c.overrides); }) == c.message);
  }
}

TEST_CASE("config: a key given twice and broken TOML name the line", "[config]") {
  const std::string twice =
      error_of([] { parse_config("[model]\nlayers = 1\nlayers = 2", "f.toml"); });
  CHECK(twice.starts_with("f.toml:3: "));
  CHECK(twice.find("'layers'") != std::string::npos);
  CHECK(error_of([] { parse_config("[model]\n\nlayers 1", "f.toml"); }).starts_with("f.toml:3: "));
}

TEST_CASE("config: names and brackets as deep as nobody means are refused before they are parsed",
          "[config]") {
  const auto message = [](const std::string& toml) {
    return error_of([&] { parse_config(toml, "f.toml"); });
  };
  const auto repeat = [](std::string_view text, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  constexpr int kMany = 100'000;  // levels of a stack that nobody has
  const std::string names = "f.toml:2: a key of more than 9 names, expected section.key";
  CHECK(message("\na" + repeat(".a", kMany) + " = 1") == names);
  CHECK(message("\n[a" + repeat(" . \"a\"", kMany) + "]") == names);
  CHECK(message("\n[[a" + repeat(".'a'", kMany) + "]]") == names);
  CHECK(message("\na = {b" + repeat(".b", kMany) + " = 1}") == names);
  CHECK(message("\na = \"x\" # \"\na.b" + repeat(".b", kMany)).starts_with("f.toml:3: a key of"));
  const std::string brackets = "f.toml:2: 9 brackets inside each other, expected at most 8";
  CHECK(message("\na = " + repeat("[", kMany)) == brackets);
  CHECK(message("\na = " + repeat("{a=", kMany)) == brackets);
  CHECK(message("\na = [\"\"\"x\"\"\"\", " + repeat("[", kMany)) == brackets);
  CHECK(message("\na = ['''\\''', " + repeat("[", kMany)) == brackets);
  CHECK(message("\na = ['\\', " + repeat("[", kMany)) == brackets);
  CHECK(message("\na = [\"\\\\\", " + repeat("[", kMany)) == brackets);
  // Dots and brackets in strings and comments are text.
  const std::string text = repeat("[.{", 40);
  const Config config =
      parse_config("# " + text + "\ndata.text = '" + text + "'\nsample.prompt = \"\"\"\n\\\"" +
                       text + "\"\"\"\n[output]\ndir = \"" + text + "\"",
                   "f.toml");
  CHECK(config.data.text == text);
  CHECK(config.sample.prompt == "\"" + text);
  CHECK(message(std::string(kMaxConfigNbytes + 1, '\n')) ==
        "f.toml: 1048577 bytes, expected at most 1048576");
}

TEST_CASE("config: what is too long for a message is cut in it", "[config]") {
  const std::string text(kMaxConfigNbytes - 100, 'x');
  const std::string word(100'000, 'x');
  for (const std::string& toml :
       {text + " = 1", "[" + text + "]", "model." + text + " = 1", "model.kind = '" + text + "'",
        "model.layers = '" + text + "'", "model.eos_ids = '" + text + "'", text,
        "model.kind = 'gpt2'\nmodel." + word + " = 1\nmodel." + word + " = 2",
        "output.dir = \"" + text + "\\u0001\"", "memory.limit = '" + text + "'"}) {
    const std::string error =
        error_of([&] { parse_config(toml + "\n[data]\ntext = 'a'", "f.toml"); });
    CAPTURE(error.substr(0, 1000));
    CHECK(error.size() > 20);
    CHECK(error.size() < 700);
  }
  for (const std::string& argument :
       {word, "--" + word + "=1", "--model.kind=" + word, "--model.layers=" + word}) {
    const std::string error =
        error_of([&] { parse_config("", "", std::vector<std::string>{argument}); });
    CAPTURE(error.substr(0, 1000));
    CHECK(error.size() > 20);
    CHECK(error.size() < 700);
  }
  CHECK(error_of([&] { config_help(word); }).size() < 1000);
}

TEST_CASE("config: errors are ConfigErrors with exit status 2", "[config]") {
  CHECK_THROWS_AS(parse_config("[model]\nlayer = 3", "f.toml"), ConfigError);
  CHECK(ConfigError("").exit_status() == 2);
}

TEST_CASE("config: a missing file is named", "[config]") {
  const testing::TempDir dir;
  CHECK(error_of([&] { load_config(dir / "none.toml"); }) ==
        dir / "none.toml: No such file or directory, expected a file");
  CHECK(error_of([&] { load_config(dir.path()); }) ==
        dir.path() + ": a directory, expected a regular file");
}

TEST_CASE("config: token 0 can be the separator after which positions restart", "[config]") {
  const Config config = parse_config(
      "[data]\ntokens = 'y'\nseparator = 0\nrestart_positions = true\n[model]\nvocab = 9",
      "f.toml");
  CHECK(config.data.separator == 0);
  CHECK(config.data.restart_positions);
}

TEST_CASE("config: the command line wins over the file, the file over the default", "[config]") {
  const Config config = parse_config(
      "[model]\nlayers = 7\nheads = 2\n[optim]\nlr = 1", "f.toml",
      std::vector<std::string>{"--model.layers=9", "--data.text", "a b", "--data.separator", "-1"});
  const auto& model = config.model.selected().as<nn::LlamaConfig>();
  CHECK(model.num_layers == 9);
  CHECK(model.num_heads == 2);
  CHECK(model.num_kv_heads == 0);
  CHECK(config.optim.schedule.peak_lr == 1.0);
  CHECK(config.data.text == "a b");
  CHECK(config.data.separator == -1);
  CHECK(config.origin("model.layers") == "command line");
  CHECK(config.origin("model.heads") == "f.toml:3");
  CHECK(config.origin("model.width") == "default");
}

TEST_CASE("config: the dump reads back as the same values, whatever they are", "[config]") {
  Config config;
  // Every field gets a value that is not its default, so that a field missing from the dump shows.
  for (const Field& field : config_fields(config)) {
    const SettingValue value = field.get();
    if (const auto* flag = std::get_if<bool>(&value)) field.assign(!*flag);
    if (const auto* integer = std::get_if<int64_t>(&value)) {
      field.assign(*integer + (static_cast<double>(*integer) < field.range.high ? 1 : -1));
    }
    if (const auto* number = std::get_if<double>(&value)) {
      field.assign(std::max(*number / 3 + 0.1, field.range.low));
    }
    if (field.is_text() && !field.key.starts_with("memory.")) {
      field.assign(field.choices.empty() ? "a\"b\\c\n\t\x01 \xc3\xa9"
                                         : std::string(field.choices.back()));
    }
  }
  config.model = {};
  config.data = {};
  config.precision.param_dtype = kBF16;
  config.data.text = "a\"b\\c\n\t\x01\x7f \xc3\xa9";
  config.output.dir = config.checkpoint.dir = "a\"b\\c \xc3\xa9";
  config.checkpoint.resume = config.profile.trace = config.output.dir;
  config.profile.steps = "2..3";
  config.eval.tasks = "piqa=a\"b\\c \xc3\xa9";
  config.train.global_batch = 0;
  config.runtime.memory_limit = int64_t{3} << 30;
  config.runtime.memory_split = 3000001;
  config.optim.schedule.warmup_steps = config.optim.schedule.decay_steps = 3;
  config.optim.groups =
      "*.norm.*, *.bias: lr_scale=2, weight_decay=0.5, optimizer=lion; head.*: frozen";
  config.optim.schedule.final_lr = config.optim.schedule.peak_lr / 7;
  const std::string dump = dump_config(config);
  const Config again = parse_config(dump, "dump");
  CHECK(dump_config(again) == dump);
  CHECK(again.data.text == config.data.text);
  CHECK(again.optim.schedule.final_lr == config.optim.schedule.final_lr);
  CHECK(again.runtime.memory_split == 3000001);
  CHECK(again.optim.groups == config.optim.groups);
  CHECK(again.eval.tasks == config.eval.tasks);
  CHECK(again.sample.prompt == config.sample.prompt);
}

TEST_CASE("config: help names every key with its default", "[config]") {
  const std::string help = config_help();
  Config config;
  for (const Field& field : config_fields(config)) {
    CAPTURE(field.key);
    CHECK(help.find("--" + std::string(field.key) + " ") != std::string::npos);
    CHECK_FALSE(field.doc.empty());
  }
  CHECK(help.find("hybrid_shard, hybrid_shard_zero2; default \"full_shard\"") != std::string::npos);
}

TEST_CASE("config: defaults are within their own ranges", "[config]") {
  Config config;
  config.data.text = "x";
  CHECK_NOTHROW(parse_config(dump_config(config), "defaults"));
}

TEST_CASE("config: true and false may be given bare where they are names", "[config]") {
  for (const char* value : {"true", "false", "'false'", "'shard'"}) {
    const Config config = parse_config(fmt::format("[fsdp]\nsync_every_micro_batch = {}", value),
                                       "f.toml", {&kText, 1});
    std::string name = value;
    std::erase(name, '\'');
    CHECK(name_of(config.fsdp.options.sync_every_micro_batch.value()) == name);
  }
  for (const char* value : {"true", "4", "'4'", "'auto'"}) {
    const Config config = parse_config(fmt::format("[fsdp]\nreshard_after_forward = {}", value),
                                       "f.toml", {&kText, 1});
    std::string name = value;
    std::erase(name, '\'');
    const auto& reshard = config.fsdp.options.reshard_after_forward;
    CHECK(reshard.has_value() == (name != "auto"));
    if (name == "true") CHECK(std::get<bool>(*reshard));
    if (name == "4") CHECK(std::get<int>(*reshard) == 4);
    CHECK(parse_config(dump_config(config), "dump").fsdp.options.reshard_after_forward == reshard);
  }
}

TEST_CASE("config: the nearest key is the one that is meant, whatever its section", "[config]") {
  const std::pair<const char*, const char*> cases[] = {
      {"lr", "optim.lr"},
      {"steps", "train.steps, profile.steps"},
      {"seed", "train.seed"},
      {"text", "data.text"},
      {"model.lr", "optim.lr"},
      {"training.steps", "train.steps, profile.steps"},
      {"batch_size", "train.micro_batch"},
      {"training.local_batch_size", "train.micro_batch"},
      {"per-device-train-batch-size", "train.micro_batch"},
      {"epochs", "train.epochs"},
      {"learning_rate", "optim.lr"},
      {"Learning_Rate", "optim.lr"},
      {"n_layer", "model.layers"},
      {"min_lr", "optim.final_lr"},
      {"gradient_checkpointing", "recompute.policy"},
      {"dir", "output.dir, checkpoint.dir"},
      {"batch", "train.micro_batch, train.global_batch, train.global_batch_tokens"},
      {"sedd", "train.seed"},
      {"stratgy", "fsdp.strategy"},
      {"model.layer", "model.layers"},
      {"train.step", "train.steps"},
      {"devise", "device"},
      {"optim.mommentum", "optim.momentum"},
  };
  for (const auto& [word, expected] : cases) {
    CAPTURE(word);
    CHECK(nearest_keys(word) == expected);
  }
  CHECK(error_of([] { parse_config("learning_rate = 1e-3", "f.toml"); }) ==
        "f.toml:1: unknown key learning_rate, expected a known one (nearest: optim.lr)");
}

TEST_CASE("config: an integer on the command line may have an exponent", "[config]") {
  const auto steps = [](const char* text) {
    return parse_config("", "",
                        std::vector<std::string>{kText, std::string("--train.steps=") + text})
        .train.steps;
  };
  CHECK(steps("1e3") == 1000);
  CHECK(steps("2.5e3") == 2500);
  CHECK(steps("1000.0") == 1000);
  CHECK(steps("1000") == 1000);
}

TEST_CASE("config: [[optim.group]] is optim.groups, and mistakes in either are named", "[config]") {
  const auto groups = [](const std::string& toml, std::vector<std::string> more = {}) {
    more.push_back(kText);
    return parse_config(toml, "f.toml", more).optim.groups;
  };
  CHECK(groups("[[optim.group]]\nmatch = \"*.norm.*, *.bias\"\nlr_scale = 2\nweight_decay = 0.0\n"
               "[[optim.group]]\nmatch = \"head.*\"\noptimizer = \"lion\"\nfrozen = true\n") ==
        "*.norm.*, *.bias: lr_scale=2, weight_decay=0; head.*: optimizer=lion, frozen");
  CHECK(groups("", {"--optim.groups=a: frozen"}) == "a: frozen");
  const auto error = [&](const std::string& toml, std::vector<std::string> more = {}) {
    return error_of([&] { groups(toml, std::move(more)); });
  };
  const std::string tables =
      ", expected tables: [[optim.group]] with match and lr_scale, weight_decay, optimizer or frozen";
  CHECK(error("[[optim.group]]\nmatch = \"a\"\nlr = 2\n") ==
        "f.toml:1: optim.group: lr = 2" + tables);
  CHECK(error("[[optim.group]]\nlr_scale = 2\n") == "f.toml:1: optim.group: match = \"\"" + tables);
  CHECK(error("[optim]\ngroup = 3\n") == "f.toml:2: optim.group" + tables);
  const std::string options = ", expected lr_scale=X, weight_decay=X, optimizer=NAME or frozen";
  CHECK(error("", {"--optim.groups=a"}) ==
        "command line: optim.groups: \"a\", expected PATTERN: lr_scale=X, weight_decay=X, "
        "optimizer=NAME or frozen");
  CHECK(error("", {"--optim.groups=a: lr=2"}) == "command line: optim.groups: \"lr=2\"" + options);
  CHECK(error("", {"--optim.groups=a: lr_scale=-2"}) ==
        "command line: optim.groups: lr_scale=-2, expected a number of at least 0");
  CHECK(error("", {"--optim.groups=a: optimizer=adam"}) ==
        "command line: optim.groups: optimizer=adam, expected one of adamw, adamw_8bit, adafactor, "
        "lion, muon, sgd");
}

TEST_CASE("config: lion has a beta2 of its own unless it is given", "[config]") {
  const auto load = [](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"--data.text=x", "--optim.schedule=constant"};
    all.insert(all.end(), more.begin(), more.end());
    return parse_config("", "f.toml", all);
  };
  const Config own = load({"--optim.name=lion"});
  CHECK(own.optim.adamw.beta2 == 0.99);
  CHECK(derived_defaults(own) == "optim.beta2 = 0.99 (that of lion)");
  const Config given = load({"--optim.name=lion", "--optim.beta2=0.98"});
  CHECK(given.optim.adamw.beta2 == 0.98);
  CHECK(derived_defaults(given).empty());
  CHECK(load({}).optim.adamw.beta2 == 0.95);
}

TEST_CASE("config: optim.final_lr is a tenth of optim.lr unless it is given", "[config]") {
  const auto optim = [](std::vector<std::string> overrides) {
    overrides.push_back(kText);
    return parse_config("", "", overrides).optim.schedule;
  };
  CHECK(optim({}).final_lr == 1e-4);
  CHECK(optim({"--optim.lr=1e-5"}).final_lr == 1e-6);
  CHECK(optim({"--optim.lr=3e-3"}).final_lr == 3e-4);
  CHECK(optim({"--optim.lr=0"}).final_lr == 0);
  CHECK(optim({"--optim.lr=1e-5", "--optim.final_lr=1e-5"}).final_lr == 1e-5);
  CHECK(error_of([&] {
          optim({"--optim.lr=1e-5", "--optim.final_lr=1e-4"});
        }) == "command line: optim.final_lr = 0.0001, expected at most optim.lr = 1e-05");
  // It is said, until the resolved configuration gives it.
  const Config config = parse_config("", "", std::vector<std::string>{kText, "--optim.lr=1e-5"});
  CHECK(derived_defaults(config) == "optim.final_lr = 1e-06 (a tenth of optim.lr)");
  const Config again = parse_config(dump_config(config), "resolved");
  CHECK(again.optim.schedule.final_lr == 1e-6);
  CHECK(again.is_resolved);
  CHECK_FALSE(config.is_resolved);
  CHECK(derived_defaults(again).empty());
}

TEST_CASE("config: param_dtype auto is bf16 on cuda, f32 on the CPU, or the checkpoint's",
          "[config]") {
  const auto resolved = [](std::vector<std::string> overrides, bool is_cuda,
                           std::optional<DType> stored = {}) {
    overrides.push_back(kText);
    Config config = parse_config("", "", overrides);
    resolve_param_dtype(config, is_cuda, stored);
    return config.precision.param_dtype;
  };
  CHECK(resolved({}, false) == kF32);
  CHECK(resolved({}, true) == kBF16);
  CHECK(resolved({}, true, kF32) == kF32);
  CHECK(resolved({}, false, kF16) == kF16);
  CHECK(resolved({"--precision.param_dtype=f32"}, true) == kF32);
  CHECK(resolved({"--precision.param_dtype=bf16"}, false, kF32) == kBF16);
  CHECK(resolved({"--optim.stochastic_rounding=true"}, true) == kBF16);
  CHECK(error_of([&] { resolved({"--optim.stochastic_rounding=true"}, false); }) ==
        "command line: optim.stochastic_rounding = true with precision.param_dtype = f32, expected "
        "bf16 or f16");
}

TEST_CASE("config: help of a section, of a key, and of neither", "[config]") {
  const std::string optim = config_help("optim");
  CHECK(optim.find("--optim.lr ") != std::string::npos);
  CHECK(optim.find("--train.steps") == std::string::npos);
  const std::string device = config_help("device");
  CHECK(device.find("--device ") != std::string::npos);
  CHECK(device.find("--optim") == std::string::npos);
  CHECK(config_help("optim.lr").find("peak learning rate") != std::string::npos);
  const std::string unknown = error_of([] { config_help("learning_rate"); });
  CHECK(unknown.starts_with(
      "command line: --help learning_rate, expected a section (model, lora, data, "));
  CHECK(unknown.ends_with("or a key (nearest: optim.lr)"));
}

TEST_CASE("config: each line of help can be read alone", "[config]") {
  Config config;
  for (const Field& field : config_fields(config)) {
    CAPTURE(field.key, field.doc);
    const std::string_view first = field.doc.substr(0, field.doc.find(' '));
    for (const char* word : {"of", "and", "by", "on", "in", "as", "with", "that", "which", "where",
                             "until", "what", "who", "how"}) {
      CHECK(first != word);
    }
  }
}

TEST_CASE("config: what no saved configuration can hold is refused before anything runs",
          "[config]") {
  const auto error = [](const std::string& key, const std::string& value) {
    return error_of([&] {
      load_config("", std::vector<std::string>{"--data.text=x", "--" + key + "=" + value});
    });
  };
  CHECK(error("output.dir", "out/a\nb") ==
        "command line: output.dir = \"out/a\\nb\": byte 0x0a at 5, expected no control character");
  CHECK(error("checkpoint.dir", "\x7f") ==
        "command line: checkpoint.dir = \"\\x7f\": byte 0x7f at 0, expected no control character");
  CHECK(error("data.text", "caf\xe9") ==
        "command line: data.text = \"caf\\xe9\": byte 0xe9 at 3, expected UTF-8");
  CHECK(error("sample.prompt", "\xff") ==
        "command line: sample.prompt = \"\\xff\": byte 0xff at 0, expected UTF-8");
  CHECK_THAT(error_of([] { parse_config("[output]\ndir = \"a\\u0000b\"", "a.toml"); }),
             Catch::StartsWith("a.toml:2: output.dir = ") &&
                 Catch::EndsWith("byte 0x00 at 1, expected no control character"));
  // Line feeds of a prompt, and any character of a path, come back from the saved configuration.
  const Config config =
      load_config("", std::vector<std::string>{"--data.text=x", "--output.dir=caf\xc3\xa9",
                                               "--sample.prompt=a\n\tb\001"});
  const Config again = parse_config(dump_config(config), "again");
  CHECK(again.output.dir == config.output.dir);
  CHECK(again.sample.prompt == config.sample.prompt);
}
