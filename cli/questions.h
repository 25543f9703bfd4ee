// Where questions come from, and answering all of them.
#pragma once

#include "anchorkv/status.h"
#include "cli/conversation.h"
#include "cli/run_options.h"

namespace anchorkv::cli {

// Without -p and --chat the one question is standard input; it joins options->questions. kInvalidArgument.
Status ReadQuestions(RunOptions* options);

// Prefills what is to be prefilled and answers the questions, or chats. The program's exit code; says what went wrong.
int AnswerQuestions(Conversation* conversation, const RunOptions& options);

}  // namespace anchorkv::cli
