# ggml and libllama: found where tools/get-llama-cpp installed them (built once per machine and kept in
# the cache directory), fetched and built now if they are not there yet.
if(NOT ANCHORKV_LLAMA_PREFIX)
  set(source_args)
  if(ANCHORKV_PORTABLE)
    list(APPEND source_args --portable)
  endif()
  if(ANCHORKV_LLAMA_CPP_DIR)
    list(APPEND source_args --source ${ANCHORKV_LLAMA_CPP_DIR})
  endif()
  execute_process(COMMAND ${PROJECT_SOURCE_DIR}/tools/get-llama-cpp ${source_args}
    OUTPUT_VARIABLE llama_prefix OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE llama_result)
  if(NOT llama_result EQUAL 0)
    message(FATAL_ERROR "llama.cpp could not be fetched or built (see above). "
      "Give a checkout with -DANCHORKV_LLAMA_CPP_DIR=DIR, or build the library alone with -DANCHORKV_BUILD_RUNTIME=OFF.")
  endif()
  set(ANCHORKV_LLAMA_PREFIX ${llama_prefix})
endif()
find_package(ggml REQUIRED CONFIG PATHS ${ANCHORKV_LLAMA_PREFIX} NO_DEFAULT_PATH)
find_package(llama REQUIRED CONFIG PATHS ${ANCHORKV_LLAMA_PREFIX} NO_DEFAULT_PATH)

# The HTTP library that llama.cpp brings along; tools/get-llama-cpp puts its sources below the prefix.
set(ANCHORKV_HTTPLIB_DIR ${ANCHORKV_LLAMA_PREFIX}/share/cpp-httplib CACHE PATH "Where httplib.h and httplib.cpp are")
if(NOT EXISTS ${ANCHORKV_HTTPLIB_DIR}/httplib.cpp)
  message(FATAL_ERROR "httplib.h and httplib.cpp (0.20 or later) are not in ${ANCHORKV_HTTPLIB_DIR}; "
    "give their folder with -DANCHORKV_HTTPLIB_DIR=DIR")
endif()

# For `anchorkv --version`.
get_filename_component(ANCHORKV_LLAMA_BUILD ${ANCHORKV_LLAMA_PREFIX} NAME)
if(ANCHORKV_LLAMA_BUILD MATCHES "^([0-9.]+)-[0-9a-f]+$")
  set(ANCHORKV_LLAMA_BUILD "of llama-cpp-python ${CMAKE_MATCH_1}")
else()
  set(ANCHORKV_LLAMA_BUILD "from a checkout")
endif()
if(ANCHORKV_PORTABLE)
  string(APPEND ANCHORKV_LLAMA_BUILD ", portable")
endif()
