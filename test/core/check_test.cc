#include "core/check.h"

#include <typeinfo>

#include "core/dtype.h"
#include "core/shape.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("check: a failed check says what, and where in the tree", "[check]") {
  const int value = 7;
  const std::string text = error_of([&] { TESSERA_CHECK(value < 5, "op: got {}", value); });
  CHECK(contains(text, "op: got 7 test/core/check_test.cc:"));
  CHECK_NOTHROW([&] { TESSERA_CHECK(value > 5, "op: got {}", value); }());
}

TEST_CASE("check: what a user gave is named without a place in the sources", "[check]") {
  const auto message = [](auto error) {
    return error_of([] { TESSERA_CHECK_AS(decltype(error), false, "key: got {}", 7); });
  };
  CHECK(message(ConfigError("")) == "key: got 7");
  CHECK(message(InputError("")) == "key: got 7");
  CHECK(message(CheckpointError("")) == "key: got 7");
  CHECK(message(NumericsError("")) == "key: got 7");
  CHECK(message(IoError("")) == "key: got 7");
  CHECK(contains(message(CommError("")), "key: got 7 test/core/check_test.cc:"));
  CHECK(contains(message(InternalError("")), "key: got 7 test/core/check_test.cc:"));
}

TEST_CASE("check: an exit status is thrown as the class that has it", "[check]") {
  CHECK_THROWS_AS(throw_with_status(2, "x"), ConfigError);
  CHECK_THROWS_AS(throw_with_status(3, "x"), InputError);
  CHECK_THROWS_AS(throw_with_status(4, "x"), CheckpointError);
  CHECK_THROWS_AS(throw_with_status(5, "x"), NumericsError);
  CHECK_THROWS_AS(throw_with_status(6, "x"), CommError);
  CHECK_THROWS_AS(throw_with_status(7, "x"), IoError);
  for (const int other : {0, 1, 8, 139}) {
    try {
      throw_with_status(other, "what it said");
    } catch (const Error& error) {
      CHECK(typeid(error) == typeid(Error));
      CHECK(std::string(error.what()) == "what it said");
    }
  }
}

TEST_CASE("check: a comparison shows the expression and both values", "[check]") {
  const std::string text = error_of([] { TESSERA_CHECK_EQ(1 + 1, 3, "op: {}", "sum"); });
  CHECK(contains(text, "op: sum (1 + 1 == 3: 2 vs 3) test/core/check_test.cc:"));
  CHECK(contains(error_of([] { TESSERA_CHECK_LT(4, 4, "op"); }), "(4 < 4: 4 vs 4)"));
  CHECK(contains(error_of([] { TESSERA_CHECK_LE(5, 4, "op"); }), "(5 <= 4: 5 vs 4)"));
  CHECK(contains(error_of([] { TESSERA_CHECK_NE(4, 4, "op"); }), "(4 != 4: 4 vs 4)"));
}

TEST_CASE("check: the operands of a comparison are evaluated once", "[check]") {
  int calls = 0;
  TESSERA_CHECK_EQ(++calls, 1, "op");
  CHECK(calls == 1);
}

TEST_CASE("check: comparing shapes or dtypes throws their errors", "[check]") {
  CHECK_THROWS_AS([] { TESSERA_CHECK_EQ((Shape{2, 3}), (Shape{3, 2}), "op"); }(), ShapeError);
  CHECK_THROWS_AS([] { TESSERA_CHECK_EQ(kF32, kBF16, "op"); }(), DtypeError);
  CHECK(contains(error_of([] { TESSERA_CHECK_EQ(kF32, kBF16, "op"); }), "f32 vs bf16"));
  const Shape shape{2, 3};
  CHECK(contains(error_of([&] { TESSERA_CHECK_EQ(shape, Shape{6}, "op"); }), "[2, 3] vs [6]"));
}

TEST_CASE("check: each class of error has the exit status that users rely on", "[check]") {
  CHECK(Error("x").exit_status() == 1);
  CHECK(ShapeError("x").exit_status() == 1);
  CHECK(OutOfMemoryError("x").exit_status() == 1);
  CHECK(ConfigError("x").exit_status() == 2);
  CHECK(InputError("x").exit_status() == 3);
  CHECK(CheckpointError("x").exit_status() == 4);
  CHECK(NumericsError("x").exit_status() == 5);
  CHECK(CommError("x").exit_status() == 6);
  CHECK(IoError("x").exit_status() == 7);
}

TEST_CASE("check: unimplemented names what is missing", "[check]") {
  CHECK_THROWS_AS([] { TESSERA_UNIMPLEMENTED("op: no {}", "way"); }(), UnimplementedError);
  CHECK(contains(error_of([] { TESSERA_UNIMPLEMENTED("op: no {}", "way"); }), "op: no way"));
}

}  // namespace
}  // namespace tessera
