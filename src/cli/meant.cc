#include "cli/meant.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/format_text.h"
#include "io/path_kind.h"

namespace hotplane::cli {
namespace {

enum class Role : uint8_t { kInvalid = 0, kStore, kCheckpoint, kOther };

// What a command takes: as its argument, and by the option that names another path.
struct Shape {
  std::string_view command;
  Role argument;  // kInvalid: it takes none
  const char* option;
  Role option_role;
};
constexpr Shape kShapes[] = {
    {"build", Role::kCheckpoint, "--store", Role::kStore},
    {"fidelity", Role::kCheckpoint, "--store", Role::kStore},
    {"boot", Role::kStore, "--checkpoint", Role::kCheckpoint},
    {"verify", Role::kStore, "--source", Role::kCheckpoint},
    {"export", Role::kStore, "--checkpoint", Role::kCheckpoint},
    {"warm", Role::kStore, nullptr, Role::kInvalid},
    {"gc", Role::kStore, nullptr, Role::kInvalid},
    {"inspect", Role::kStore, nullptr, Role::kInvalid},
    {"synth", Role::kStore, nullptr, Role::kInvalid},
    {"doctor", Role::kInvalid, "--store", Role::kStore},
    {"import", Role::kStore, "--planes-cache", Role::kOther},
};
constexpr std::string_view kStoreWords[] = {"--store", "--dir", "--path"};
constexpr std::string_view kCheckpointWords[] = {"--checkpoint", "--model", "--source", "--path"};

const Shape* ShapeOf(const std::string& command) {
  for (const Shape& shape : kShapes)
    if (shape.command == command) return &shape;
  return nullptr;
}

bool Names(const std::string& option, Role role) {
  const auto among = [&](const auto& words) {
    return std::find(std::begin(words), std::end(words), option) != std::end(words);
  };
  return (role == Role::kStore && among(kStoreWords)) ||
         (role == Role::kCheckpoint && among(kCheckpointWords));
}

std::string_view RoleText(Role role) {
  return role == Role::kStore ? "the store" : role == Role::kCheckpoint ? "the checkpoint" : "it";
}

Role RoleOf(const std::string& path) {
  switch (PathKindOf(PosixEnv(), path)) {
    case PathKind::kStore:
    case PathKind::kGeneration: return Role::kStore;
    case PathKind::kCheckpoint:
    case PathKind::kSafetensors: return Role::kCheckpoint;
    case PathKind::kPlanesCache: return Role::kOther;
    default: return Role::kInvalid;  // may be either
  }
}

// What stands for a path that nobody has named.
std::string Placeholder(Role role) {
  return role == Role::kStore ? "DIR" : role == Role::kCheckpoint ? "CHECKPOINT" : "CACHE";
}

std::string Quoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-=:,+@%~";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

bool IsArgument(const Word& word) { return word.option.empty(); }

Word* FindArgument(CommandLine* line) {
  const auto found = std::find_if(line->words.begin(), line->words.end(), IsArgument);
  return found == line->words.end() ? nullptr : &*found;
}

Word* FindOption(CommandLine* line, const std::string& option) {
  for (Word& word : line->words)
    if (word.option == option) return &word;
  return nullptr;
}

Status Meant(std::string what, const CommandLine& line) {
  return Status::Usage(std::move(what))
      .Advice(Text("`{}` is probably what was meant", TextOf(line)));
}

// An option that the command does not have, for the path that is its argument.
Status ArgumentAsOption(const Shape& shape, CommandLine line, size_t at) {
  std::string what = Text("`{}` takes {} as its argument, not as {}", shape.command,
                          RoleText(shape.argument), line.words[at].option);
  Word argument{.option = "", .value = line.words[at].value};
  line.words.erase(line.words.begin() + static_cast<ptrdiff_t>(at));
  Word* const there = FindArgument(&line);
  // With an argument beside it, that is the other path where the command takes another.
  if (there != nullptr && shape.option != nullptr && FindOption(&line, shape.option) == nullptr &&
      there->value != argument.value && RoleOf(there->value) != shape.argument) {
    there->option = shape.option;
    there->valued = true;
    line.words.insert(line.words.begin(), std::move(argument));
  } else if (there == nullptr) {
    line.words.insert(line.words.begin(), std::move(argument));
  } else {
    *there = std::move(argument);
  }
  return Meant(std::move(what), line);
}

// One argument more than the command takes, in the place of the option that names the other path.
std::optional<Status> OptionAsArgument(const Shape& shape, CommandLine line) {
  const auto count =
      static_cast<size_t>(std::count_if(line.words.begin(), line.words.end(), IsArgument));
  const size_t taken = shape.argument == Role::kInvalid ? 0 : 1;
  if (shape.option == nullptr || count != taken + 1 || FindOption(&line, shape.option) != nullptr)
    return std::nullopt;
  std::vector<Word*> arguments;
  for (Word& word : line.words)
    if (IsArgument(word)) arguments.push_back(&word);
  Word* const first = arguments.front();
  Word* const last = arguments.back();
  if (first != last) {
    const Role found[] = {RoleOf(first->value), RoleOf(last->value)};
    if ((found[0] == shape.option_role && found[1] != shape.option_role) ||
        (found[1] == shape.argument && found[0] != shape.argument))
      std::swap(first->value, last->value);
  }
  last->option = shape.option;
  last->valued = true;
  return Meant(Text("`{}` takes {} as {}, not as an argument", shape.command,
                    RoleText(shape.option_role), shape.option),
               line);
}

std::string_view WithoutSlashes(std::string_view path) {
  while (path.size() > 1 && path.ends_with('/')) path.remove_suffix(1);
  return path;
}

// The argument and the option's path, each with what it is there for and what it is.
struct Given {
  Word* word;
  Role wanted;
  Role found;
  bool wrong() const { return word != nullptr && found != Role::kInvalid && found != wanted; }
};

}  // namespace

const std::string* CommandLine::ValueOf(const std::string& option) const {
  for (const Word& word : words)
    if (word.option == option) return &word.value;
  return nullptr;
}

std::string TextOf(const CommandLine& line) {
  std::string text = "hotplane " + line.command;
  for (const Word& word : line.words) {
    if (!word.option.empty()) text += " " + word.option;
    if (word.option.empty() || word.valued) text += " " + Quoted(word.value);
  }
  return text;
}

bool NamesAPath(const std::string& option) {
  return Names(option, Role::kStore) || Names(option, Role::kCheckpoint);
}

std::optional<Status> MisplacedPath(const CommandLine& line) {
  const Shape* const shape = ShapeOf(line.command);
  if (shape == nullptr) return std::nullopt;
  for (size_t i = 0; i < line.words.size(); ++i) {
    const Word& word = line.words[i];
    if (word.known || word.option.empty()) continue;
    // Of another option that there is not nobody knows whether the next word is its value.
    if (word.value.empty()) return std::nullopt;
    if (Names(word.option, shape->argument)) return ArgumentAsOption(*shape, line, i);
    if (!Names(word.option, shape->option_role) || line.ValueOf(shape->option) != nullptr)
      return std::nullopt;
    CommandLine renamed = line;
    renamed.words[i].option = shape->option;
    return Meant(Text("`{}` takes {} as {}, not as {}", shape->command,
                      RoleText(shape->option_role), shape->option, word.option),
                 renamed);
  }
  if (std::optional<Status> moved = OptionAsArgument(*shape, line)) return moved;
  const char* const store = std::getenv("HOTPLANE_STORE");
  const bool argument = std::any_of(line.words.begin(), line.words.end(), IsArgument);
  if (shape->argument != Role::kStore || argument || store == nullptr || *store == '\0')
    return std::nullopt;
  CommandLine named = line;
  named.words.insert(named.words.begin(), Word{.option = "", .value = store});
  return Meant(Text("`{}` takes the store as its argument; HOTPLANE_STORE stands for --store of "
                    "other commands",
                    shape->command),
               named);
}

Status WithPathsMeant(const Status& status, const CommandLine& given_line) {
  const Shape* const shape = ShapeOf(given_line.command);
  if (shape == nullptr || shape->option == nullptr || shape->argument == Role::kInvalid ||
      status.code() != StatusCode::kUsage)
    return status;
  CommandLine line = given_line;
  // A part or a planes cache is exported without a checkpoint.
  const bool takes_option = shape->command != "export" || FindOption(&line, "--hf") != nullptr;
  const bool option_given = FindOption(&line, shape->option) != nullptr;
  if (!option_given && !takes_option) return status;
  // A checkpoint that is given as the store has a place to go.
  if (!option_given)
    line.words.push_back(
        {.option = shape->option, .value = Placeholder(shape->option_role), .valued = true});
  const auto look = [](Word* word, Role wanted) {
    if (word == nullptr) return Given{word, wanted, Role::kInvalid};
    const bool both = wanted == Role::kCheckpoint && HoldsCheckpoint(PosixEnv(), word->value);
    return Given{word, wanted, both ? wanted : RoleOf(word->value)};
  };
  const Given argument = look(FindArgument(&line), shape->argument);
  const Given option = look(FindOption(&line, shape->option), shape->option_role);
  const auto explains = [&](const Given& given) {
    return given.wrong() && WithoutSlashes(status.file()) == WithoutSlashes(given.word->value);
  };
  if (!explains(argument) && !explains(option)) return status;
  const bool fits_option = argument.wrong() && argument.found == option.wanted;
  if (fits_option && option.found != option.wanted) {
    option.word->value = std::exchange(argument.word->value, option.found == argument.wanted
                                                                 ? option.word->value
                                                                 : Placeholder(argument.wanted));
  } else {
    if (argument.wrong()) argument.word->value = Placeholder(argument.wanted);
    if (option.wrong()) option.word->value = Placeholder(option.wanted);
    if (!option_given) line.words.pop_back();
  }
  std::string advice = Text("`{}` is probably what was meant", TextOf(line));
  if (!status.advice().empty()) advice += "; " + status.advice();
  return Status(status).Advice(std::move(advice));
}

}  // namespace hotplane::cli
