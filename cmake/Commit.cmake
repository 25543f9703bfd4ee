# ANCHORKV_KNOWN_COMMIT: what this tree is, for `anchorkv --version`. From -DANCHORKV_COMMIT=..., from the file that
# `git archive` fills in, or from git where the tree is a checkout; empty otherwise.
set(ANCHORKV_COMMIT "" CACHE STRING "The commit that is built, where neither git nor an archive's commit.txt says so")
set(ANCHORKV_KNOWN_COMMIT "${ANCHORKV_COMMIT}")
if(NOT ANCHORKV_KNOWN_COMMIT)
  file(STRINGS ${PROJECT_SOURCE_DIR}/cmake/commit.txt ANCHORKV_KNOWN_COMMIT LIMIT_COUNT 1)
endif()
if(NOT ANCHORKV_KNOWN_COMMIT MATCHES "^[0-9a-f]+$")
  set(ANCHORKV_KNOWN_COMMIT "")
  find_package(Git QUIET)
  if(Git_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/.git)
    execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse HEAD WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
      OUTPUT_VARIABLE ANCHORKV_KNOWN_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    # The next commit configures again, so that the program does not name this one.
    execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --path-format=absolute --git-path logs/HEAD
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE log OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(EXISTS "${log}")
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${log})
    endif()
  endif()
endif()
