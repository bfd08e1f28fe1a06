#pragma once

#include "core/enum_names.h"

// What can be set of conversations.

namespace tessera::text {

enum class ChatShape : unsigned char { kAuto, kMessages, kPromptCompletion, kSharegpt, kAlpaca };
enum class TrainOn : unsigned char { kAssistant, kCompletion, kLast, kAll };
enum class LongChats : unsigned char { kCut, kDrop };  ///< those longer than the context

constexpr auto enum_names(ChatShape) {
  return std::to_array<EnumName<ChatShape>>({{ChatShape::kAuto, "auto"},
                                             {ChatShape::kMessages, "messages"},
                                             {ChatShape::kPromptCompletion, "prompt_completion"},
                                             {ChatShape::kSharegpt, "sharegpt"},
                                             {ChatShape::kAlpaca, "alpaca"}});
}
constexpr auto enum_names(TrainOn) {
  return std::to_array<EnumName<TrainOn>>({{TrainOn::kAssistant, "assistant"},
                                           {TrainOn::kCompletion, "completion"},
                                           {TrainOn::kLast, "last"},
                                           {TrainOn::kAll, "all"}});
}
constexpr auto enum_names(LongChats) {
  return std::to_array<EnumName<LongChats>>({{LongChats::kCut, "cut"}, {LongChats::kDrop, "drop"}});
}

}  // namespace tessera::text
