// What a saved model makes of conversations, for apps/compare/exported.py:
//   chat_logits CHECKPOINT CHATS
// A line a conversation: {"ids": [...], "trained": [0 or 1, ...], "logits": [[...], ...]}, f32, on the CPU.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/chats.h"
#include "apps/program.h"
#include "apps/saved_model.h"
#include "apps/text/chat.h"
#include "core/autograd.h"
#include "core/runtime/context.h"

int main(int argc, char** argv) {
  using namespace tessera;
  return apps::run_program([&] {
    if (argc != 3) throw ConfigError("usage: chat_logits CHECKPOINT CHATS");
    const Context::Scope scope(std::make_shared<Context>(ContextOptions{}));
    const apps::SavedModel saved = apps::load_model(argv[1]);
    const std::shared_ptr<const text::Tokenizer> tokenizer = apps::tokenizer_of(saved.home);
    apps::ChatReader reader(
        {argv[2]},
        std::make_shared<const text::ChatTemplate>(text::load_chat_template(saved.home, "")),
        tokenizer, {});
    const NoGrad no_grad;
    for (apps::Chat chat; reader.next(chat);) {
      const std::vector<int32_t>& ids = chat.tokens.ids;
      const std::vector<double> logits =
          saved.model->logits(from_values(ids, {1, std::ssize(ids)})).to_vector();
      nlohmann::json rows = nlohmann::json::array();
      const size_t width = logits.size() / ids.size();
      for (size_t i = 0; i < logits.size(); i += width) {
        rows.push_back(
            std::vector<double>(logits.begin() + static_cast<std::ptrdiff_t>(i),
                                logits.begin() + static_cast<std::ptrdiff_t>(i + width)));
      }
      const nlohmann::json line = {
          {"ids", ids}, {"trained", chat.tokens.is_trained}, {"logits", rows}};
      std::printf("%s\n", line.dump().c_str());
    }
    return 0;
  });
}
