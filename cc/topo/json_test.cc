#include "topo/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace turbobus::topo {
namespace {

std::string ErrorOf(std::string_view text) {
  const StatusOr<JsonValue> value = ParseJson(text);
  if (value.ok()) return "";
  EXPECT_EQ(value.status().code(), StatusCode::kInvalidArgument);
  return value.status().message();
}

TEST(JsonTest, ReadsEveryKindOfValue) {
  const StatusOr<JsonValue> root = ParseJson(
      R"( {"a": [1, -2.5e3, true, false, null, "x"], "b": {}, "c": []} )");
  ASSERT_TRUE(root.ok()) << root.status();
  const JsonValue* a = root->Find("a");
  ASSERT_NE(a, nullptr);
  ASSERT_EQ(a->array.size(), 6u);
  EXPECT_EQ(a->array[0].number, 1);
  EXPECT_EQ(a->array[1].number, -2500);
  EXPECT_TRUE(a->array[2].boolean);
  EXPECT_FALSE(a->array[3].boolean);
  EXPECT_EQ(a->array[4].type, JsonValue::Type::kNull);
  EXPECT_EQ(a->array[5].string, "x");
  EXPECT_EQ(root->Find("b")->type, JsonValue::Type::kObject);
  EXPECT_EQ(root->Find("c")->type, JsonValue::Type::kArray);
  EXPECT_EQ(root->Find("d"), nullptr);
}

TEST(JsonTest, UnescapesStringsToUtf8) {
  const StatusOr<JsonValue> value =
      ParseJson(R"("\"\\\/\b\f\n\r\t\u0041\u00e9\u20ac\ud83d\ude80")");
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(value->string,
            "\"\\/\b\f\n\r\tA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\x80");
}

TEST(JsonTest, RemembersTheLineOfEachValue) {
  const StatusOr<JsonValue> root = ParseJson("{\n  \"a\":\n  7\n}");
  ASSERT_TRUE(root.ok());
  EXPECT_EQ(root->line, 1);
  EXPECT_EQ(root->Find("a")->line, 3);
}

TEST(JsonTest, SaysWhereAndWhatItExpected) {
  EXPECT_EQ(ErrorOf("{\n \"a\" 1}"),
            "line 2, column 6: expected ':', got \"1}\"");
  EXPECT_NE(ErrorOf("{\"a\": [1,").find("is it cut short?"), std::string::npos);
  EXPECT_NE(ErrorOf("{\"a\": NaN}").find("not JSON"), std::string::npos);
  EXPECT_NE(ErrorOf("{\"a\": 1, \"a\": 2}").find("twice"), std::string::npos);
  EXPECT_NE(ErrorOf("1e999").find("does not fit"), std::string::npos);
}

TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const std::string_view text : {"",
                                      " ",
                                      "{",
                                      "}",
                                      "[1,]",
                                      "{\"a\":1,}",
                                      "{a: 1}",
                                      "{'a': 1}",
                                      "01",
                                      "+1",
                                      "1.",
                                      ".5",
                                      "1e",
                                      "-",
                                      "tru",
                                      "nul",
                                      "Infinity",
                                      "-Infinity",
                                      "inf",
                                      "0x10",
                                      "\"",
                                      "\"\\",
                                      "\"\\x\"",
                                      "\"\\u12\"",
                                      "\"\\u12g4\"",
                                      "\"\\ud800\"",
                                      "\"\\ud800\\u0041\"",
                                      "\"\\udc00\"",
                                      "\"\n\"",
                                      "1 2",
                                      "[] []",
                                      "// x",
                                      "\"\xFF\"",
                                      "\"\xC0\x80\"",
                                      "\"\xED\xA0\x80\"",
                                      "\"\xF5\x80\x80\x80\"",
                                      "\"\xE2\x82\""}) {
    EXPECT_NE(ErrorOf(text), "") << text;
  }
}

TEST(JsonTest, RefusesDeepNestingInsteadOfOverflowingTheStack) {
  EXPECT_TRUE(ParseJson(std::string(32, '[') + std::string(32, ']')).ok());
  EXPECT_NE(ErrorOf(std::string(100000, '[')).find("32 levels"),
            std::string::npos);
}

TEST(JsonTest, NumbersReadBackAsTheyWere) {
  for (const double number :
       {0.0, -1.0, 0.1, 1.0 / 3.0, 55.3e9, 1e15, 123456789.125, 1e300, 5e-324,
        std::numeric_limits<double>::max()}) {
    const StatusOr<JsonValue> value = ParseJson(JsonNumber(number));
    ASSERT_TRUE(value.ok()) << JsonNumber(number);
    EXPECT_EQ(value->number, number);
  }
  EXPECT_EQ(JsonNumber(55300000000), "55300000000");
}

TEST(JsonTest, StringsReadBackAsTheyWere) {
  const std::string text = "a\"\\\n\x01\xC3\xA9/";
  const StatusOr<JsonValue> value = ParseJson(JsonString(text));
  ASSERT_TRUE(value.ok());
  EXPECT_EQ(value->string, text);
}

TEST(JsonTest, QuotedTextIsShortAndPrintable) {
  EXPECT_EQ(Quote("a\"b\n\xFF"), "\"a\\\"b\\x0a\\xff\"");
  EXPECT_LT(Quote(std::string(1000, 'x')).size(), 80u);
}

}  // namespace
}  // namespace turbobus::topo
