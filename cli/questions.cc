#include "cli/questions.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

#include "cli/command.h"
#include "cli/document.h"
#include "cli/interrupt.h"

namespace anchorkv::cli {
namespace {

// Questions line by line until the input ends. An interrupt stops the answer that is being written; one at
// the prompt ends the chat.
Status Chat(Conversation* conversation) {
  const bool prompt = isatty(STDIN_FILENO) != 0;
  std::string line;
  while (true) {
    if (prompt) std::fputs("> ", stderr);
    if (!std::getline(std::cin, line)) break;
    const std::string question = Trim(line);
    if (question.empty()) continue;
    if (const Status text = CheckText(question, "the question"); !text.ok()) {
      Note(text.message());
      continue;
    }
    AKV_RETURN_IF_ERROR(conversation->Ask(question));
    if (Interrupted()) RearmInterrupts();
  }
  if (prompt) std::fputs("\n", stderr);
  return {};
}

// The one question of a pipe: everything on standard input.
Result<std::string> ReadPipedQuestion() {
  if (isatty(STDIN_FILENO) != 0) {
    return InvalidArgument("no question: give one with -p TEXT, pipe it in, or start a chat with --chat");
  }
  const std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  if (Trim(text).empty()) return InvalidArgument("no question: give one with -p TEXT (standard input is empty)");
  AKV_RETURN_IF_ERROR(CheckText(text, "the question on standard input"));
  return Trim(text);
}

}  // namespace

Status ReadQuestions(RunOptions* options) {
  if (!options->questions.empty() || options->chat) return {};
  AKV_ASSIGN_OR_RETURN(std::string question, ReadPipedQuestion());
  options->questions.push_back(std::move(question));
  return {};
}

int AnswerQuestions(Conversation* conversation, const RunOptions& options) {
  Status status = conversation->Start();
  if (options.questions.empty()) {
    if (status.ok()) status = Chat(conversation);
  } else {
    for (const std::string& question : options.questions) {
      if (!status.ok() || Interrupted()) break;
      status = conversation->Ask(question);
    }
  }
  if (Interrupted()) {
    Note("interrupted");
    return kExitInterrupted;
  }
  if (!status.ok()) return Fail(status);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return Fail("cannot write to standard output", kExitFailure);
  return kExitOk;
}

}  // namespace anchorkv::cli
