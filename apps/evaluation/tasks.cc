#include "apps/evaluation/tasks.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "apps/evaluation/python_random.h"
#include "apps/text/jinja/unicode.h"
#include "core/files.h"
#include "core/formats/strict_json.h"
#include "core/split.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

using TaskJson = nlohmann::json;

/// A row in the terms that all forms share.
struct Doc {
  std::string where;
  TaskJson row = {};
  std::string description = {};
  std::string query = {};
  std::vector<std::string> choices = {};
  std::vector<std::string> contexts = {};  // in place of the query, one a choice
  std::string target = {};                 // what follows each of them
  int64_t gold = 0;
  std::vector<std::string> answers = {}, until = {};
};

std::string_view shape_of(TaskForm form) {
  switch (form) {
    case TaskForm::kHellaswag:
      return R"({"activity_label", "ctx_a", "ctx_b", "endings", "label"})";
    case TaskForm::kArc:
      return R"({"question", "choices": {"text", "label"}, "answerKey"})";
    case TaskForm::kMmlu:
      return R"({"question", "choices", "answer"})";
    case TaskForm::kPiqa:
      return R"({"goal", "sol1", "sol2", "label"})";
    case TaskForm::kWinogrande:
      return R"({"sentence", "option1", "option2", "answer"})";
    case TaskForm::kChoice:
      return R"({"prompt", "choices", "answer"})";
    case TaskForm::kGenerate:
      return R"({"prompt", "answer"})";
    case TaskForm::kLambada:
    case TaskForm::kText:
      return R"({"text"})";
  }
  return "";
}

/// Fields of a row, with errors that name it.
class Row {
 public:
  Row(TaskForm form, const std::string& where, const TaskJson& row)
      : form_(form), where_(where), row_(row) {
    if (!row.is_object()) fail(fmt::format("{}", json_text(row)));
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("{}: {}, expected a row of {}: {}", where_, what, name_of(form_),
                                 shape_of(form_)));
  }
  const TaskJson& at(std::string_view name, const TaskJson& in) const {
    const auto found = in.is_object() ? in.find(name) : in.end();
    if (found == in.end()) fail(fmt::format("no \"{}\"", name));
    return *found;
  }
  std::string text(std::string_view name) const { return text_of(name, at(name, row_)); }
  std::vector<std::string> texts(std::string_view name) const {
    return texts_of(name, at(name, row_));
  }
  std::vector<std::string> texts(std::string_view name, std::string_view inside) const {
    return texts_of(inside, at(inside, at(name, row_)));
  }
  bool has(std::string_view name) const { return row_.contains(name); }
  const TaskJson& value(std::string_view name) const { return at(name, row_); }
  /// A number, or a text of one.
  int64_t number(std::string_view name) const {
    const TaskJson& value = at(name, row_);
    if (value.is_number_integer()) return value.get<int64_t>();
    int64_t number = 0;
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
      if (error == std::errc() && end == text.data() + text.size()) return number;
    }
    fail(fmt::format("\"{}\" is {}", name, json_text(value)));
  }
  std::vector<std::string> text_or_texts(std::string_view name) const {
    const TaskJson& value = at(name, row_);
    return value.is_array() ? texts_of(name, value) : std::vector{text_of(name, value)};
  }

 private:
  std::string text_of(std::string_view name, const TaskJson& value) const {
    if (!value.is_string()) fail(fmt::format("\"{}\" is {}", name, json_text(value)));
    return value.get<std::string>();
  }
  std::vector<std::string> texts_of(std::string_view name, const TaskJson& value) const {
    if (!value.is_array() || value.empty()) {
      fail(fmt::format("\"{}\" is {}", name, json_text(value)));
    }
    std::vector<std::string> texts;
    for (const TaskJson& element : value) texts.push_back(text_of(name, element));
    return texts;
  }

  static std::string_view name_of(TaskForm form) {
    for (const auto& entry : kEnumNames<TaskForm>) {
      if (entry.value == form) return entry.name;
    }
    return "";
  }

  TaskForm form_;
  const std::string& where_;
  const TaskJson& row_;
};

constexpr std::string_view kSpace = " \t\n\r\f\v";

std::string_view stripped(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

/// What HellaSwag's captions have of the site that they come from.
std::string without_marks(std::string_view given) {
  std::string text(stripped(given));
  replace_all(text, " [title]", ". ");
  for (size_t at = 0; (at = text.find('[', at)) != std::string::npos;) {
    const size_t end = text.find_first_of("]\n", at);
    if (end == std::string::npos || text[end] == '\n') {
      ++at;
    } else {
      text.erase(at, end + 1 - at);
    }
  }
  replace_all(text, "  ", " ");
  return text;
}

void read_hellaswag(const Row& row, Doc& doc) {
  const std::string label = row.text("activity_label"), before = row.text("ctx_a");
  doc.query =
      without_marks(label + ": " + before + " " + text::jinja::capitalize(row.text("ctx_b")));
  for (const std::string& ending : row.texts("endings")) {
    doc.choices.push_back(without_marks(ending));
  }
  doc.gold = row.number("label");
}

void read_arc(const Row& row, Doc& doc) {
  doc.query = "Question: " + row.text("question") + "\nAnswer:";
  doc.choices = row.texts("choices", "text");
  const std::vector<std::string> labels = row.texts("choices", "label");
  const std::string key = row.text("answerKey");
  const auto found = std::find(labels.begin(), labels.end(), key);
  if (found == labels.end()) row.fail(fmt::format("\"answerKey\" is {}", json_text(key)));
  doc.gold = found - labels.begin();
}

void read_mmlu(const Row& row, Doc& doc) {
  const std::vector<std::string> choices = row.texts("choices");
  if (choices.size() > 26) row.fail(fmt::format("\"choices\" has {} of them", choices.size()));
  doc.query = std::string(stripped(row.text("question"))) + "\n";
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string letter(1, static_cast<char>('A' + i));
    doc.query += letter + ". " + choices[i] + "\n";
    doc.choices.push_back(letter);
  }
  doc.query += "Answer:";
  doc.gold = row.number("answer");
  if (!row.has("subject")) return;
  std::string subject = row.text("subject");
  replace_all(subject, "_", " ");
  doc.description = fmt::format(
      "The following are multiple choice questions (with answers) about {}.\n\n", subject);
}

void read_piqa(const Row& row, Doc& doc) {
  doc.query = "Question: " + row.text("goal") + "\nAnswer:";
  doc.choices = {row.text("sol1"), row.text("sol2")};
  doc.gold = row.number("label");
}

/// The choices stand in the context; what is scored is the rest of the sentence.
void read_winogrande(const Row& row, Doc& doc) {
  const std::string sentence = row.text("sentence");
  const size_t gap = sentence.find('_');
  if (gap == std::string::npos) row.fail("a \"sentence\" without _");
  for (const char* name : {"option1", "option2"}) {
    doc.choices.push_back(row.text(name));
    doc.contexts.push_back(sentence.substr(0, gap) + doc.choices.back());
  }
  doc.target = stripped(std::string_view(sentence).substr(gap + 1));
  doc.gold = row.number("answer") - 1;
  if (doc.gold < 0 || doc.gold > 1) row.fail(fmt::format("\"answer\" is {}", doc.gold + 1));
}

void read_lambada(const Row& row, Doc& doc) {
  const std::string text = row.text("text");
  const size_t space = text.rfind(' ');
  if (space == std::string::npos) row.fail("a \"text\" of one word");
  doc.query = text.substr(0, space);
  doc.choices = {text.substr(space)};
}

Doc read_doc(TaskForm form, std::string where, TaskJson json) {
  Doc doc{.where = std::move(where), .row = std::move(json)};
  const Row row(form, doc.where, doc.row);
  switch (form) {
    case TaskForm::kHellaswag:
      read_hellaswag(row, doc);
      break;
    case TaskForm::kArc:
      read_arc(row, doc);
      break;
    case TaskForm::kMmlu:
      read_mmlu(row, doc);
      break;
    case TaskForm::kPiqa:
      read_piqa(row, doc);
      break;
    case TaskForm::kWinogrande:
      read_winogrande(row, doc);
      break;
    case TaskForm::kLambada:
      read_lambada(row, doc);
      break;
    case TaskForm::kChoice:
      doc.query = row.text("prompt");
      doc.choices = row.texts("choices");
      doc.gold = row.number("answer");
      break;
    case TaskForm::kGenerate:
      doc.query = row.text("prompt");
      doc.answers = row.text_or_texts("answer");
      doc.until = row.has("until") ? row.texts("until") : std::vector<std::string>{"\n\n"};
      break;
    case TaskForm::kText:
      doc.choices = {row.text("text")};
      break;
  }
  const int64_t num_choices = std::ssize(doc.choices);
  if (num_choices > 0 && (doc.gold < 0 || doc.gold >= num_choices)) {
    row.fail(fmt::format("the answer is choice {} of {} (the first is 0)", doc.gold, num_choices));
  }
  for (size_t i = 0; i < doc.choices.size(); ++i) {
    if (stripped(doc.choices[i]).empty()) row.fail(fmt::format("choice {} is empty", i));
  }
  if (form == TaskForm::kWinogrande && doc.target.empty()) row.fail("nothing behind the _");
  return doc;
}

std::vector<Doc> read_docs(TaskForm form, const std::string& path, int64_t limit) {
  constexpr int64_t kMaxNbytes = int64_t{4} << 30;
  constexpr int kMaxDepth = 8;
  const std::string text = read_regular_file(path, kMaxNbytes);
  std::vector<Doc> docs;
  int64_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view row = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++line;
    if (stripped(row).empty()) continue;
    std::string where = fmt::format("{}: line {}", path, line);
    TaskJson json = parse_strict_json(where, row, kMaxDepth, "a JSON object a line");
    docs.push_back(read_doc(form, std::move(where), std::move(json)));
    if (std::ssize(docs) == limit) break;
  }
  if (docs.empty()) throw InputError(fmt::format("{}: no rows, expected JSON lines", path));
  return docs;
}

std::string example_text(TaskForm form, const Doc& doc) {
  if (form == TaskForm::kWinogrande) {
    return doc.contexts[static_cast<size_t>(doc.gold)] + " " + doc.target + "\n\n";
  }
  const std::string& answer =
      form == TaskForm::kGenerate ? doc.answers[0] : doc.choices[static_cast<size_t>(doc.gold)];
  return doc.query + " " + answer + "\n\n";
}

/// The examples before each row, drawn one row after the other.
class Examples {
 public:
  Examples(TaskForm form, const std::string& path, const TaskOptions& options)
      : form_(form), count_(static_cast<size_t>(options.num_fewshot)), random_(options.seed) {
    if (count_ == 0) return;
    if (form == TaskForm::kText) {
      throw InputError(fmt::format("{}: {} examples before a text, expected none", path, count_));
    }
    is_own_ = options.fewshot_path.empty();
    path_ = is_own_ ? path : options.fewshot_path;
    docs_ = read_docs(form, path_, 0);
    const size_t needed = count_ + (is_own_ ? 1 : 0);
    if (docs_.size() < needed) {
      throw InputError(fmt::format("{}: {} rows, expected at least {} for {} examples{}", path_,
                                   docs_.size(), needed, count_,
                                   is_own_ ? " beside the row that is asked" : ""));
    }
  }

  std::string before(const Doc& doc) {
    if (count_ == 0) return "";
    std::string text;
    for (const size_t index : drawn(doc)) text += example_text(form_, docs_[index]);
    return text;
  }

 private:
  std::vector<size_t> drawn(const Doc& doc) {
    const bool is_first = form_ == TaskForm::kMmlu;
    std::vector<size_t> indices;
    if (is_first) {
      for (size_t i = 0; i < docs_.size(); ++i) indices.push_back(i);
    } else {
      indices = random_.sample(docs_.size(), count_ + (is_own_ ? 1 : 0));
    }
    const auto is_asked = [&](size_t i) { return is_own_ && docs_[i].row == doc.row; };
    std::erase_if(indices, is_asked);
    if (indices.size() < count_) {  // the row stands there more than once
      std::vector<size_t> others;
      for (size_t i = 0; i < docs_.size(); ++i) {
        if (!is_asked(i)) others.push_back(i);
      }
      if (others.size() < count_) {
        throw InputError(fmt::format("{}: {} other rows than {}, expected {} examples", path_,
                                     others.size(), doc.where, count_));
      }
      indices.clear();
      for (const size_t i : random_.sample(others.size(), count_)) indices.push_back(others[i]);
    }
    indices.resize(count_);
    return indices;
  }

  TaskForm form_;
  size_t count_;
  PythonRandom random_;
  bool is_own_ = false;
  std::string path_;
  std::vector<Doc> docs_;
};

}  // namespace

bool EvalTask::has_norm() const {
  return form == TaskForm::kHellaswag || form == TaskForm::kArc || form == TaskForm::kPiqa ||
         form == TaskForm::kChoice;
}

std::vector<TaskFile> parse_tasks(const std::vector<std::string>& texts, std::string_view subject) {
  std::vector<TaskFile> files;
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    std::string forms;
    bool is_found = false;
    for (const auto& entry : kEnumNames<TaskForm>) {
      if (equals != std::string::npos && text.substr(0, equals) == entry.name &&
          equals + 1 < text.size()) {
        files.push_back({entry.value, text.substr(equals + 1), std::string(entry.name)});
        is_found = true;
      }
      forms += (forms.empty() ? "" : ", ") + std::string(entry.name);
    }
    if (is_found) continue;
    throw ConfigError(
        fmt::format("{}{}, expected FORM=FILE with one of {}", subject, shorten(text), forms));
  }
  const std::vector<TaskFile> all = files;
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) {
      if (i == j || all[i].form != all[j].form) continue;
      if (all[i].path == all[j].path) {
        throw ConfigError(fmt::format("{}{}, expected each task once", subject, shorten(texts[i])));
      }
      files[i].name = texts[i];
    }
  }
  return files;
}

std::vector<TaskFile> parse_tasks(std::string_view list) {
  std::vector<std::string> texts;
  for (const std::string_view text : split(list, ',')) texts.emplace_back(text);
  return parse_tasks(texts, "eval.tasks: ");
}

EvalTask load_task(TaskForm form, const std::string& path, const TaskOptions& options) {
  EvalTask task;
  task.form = form;
  for (const auto& entry : kEnumNames<TaskForm>) {
    if (entry.value == form) task.name = entry.name;
  }
  Examples examples(form, path, options);
  for (Doc& doc : read_docs(form, path, options.limit)) {
    EvalItem item;
    item.where = doc.where;
    item.gold = doc.gold;
    const std::string before = doc.description + examples.before(doc);
    if (form == TaskForm::kGenerate) {
      item.prompt = before + doc.query;
      item.answers = std::move(doc.answers), item.until = std::move(doc.until);
    }
    for (size_t i = 0; i < doc.choices.size(); ++i) {
      const std::string& choice = doc.choices[i];
      Continuation c;
      c.num_chars = static_cast<int64_t>(text::jinja::count_chars(choice));
      if (form == TaskForm::kText || form == TaskForm::kLambada) {
        c.text = choice;
      } else {
        c.text = " " + (doc.contexts.empty() ? choice : doc.target);
      }
      if (form != TaskForm::kText) {
        c.context = before + (doc.contexts.empty() ? doc.query : doc.contexts[i]);
      }
      item.continuations.push_back(std::move(c));
    }
    task.items.push_back(std::move(item));
  }
  return task;
}

}  // namespace tessera::apps
