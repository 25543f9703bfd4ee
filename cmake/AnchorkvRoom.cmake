# anchorkv_room(NAME SOURCES... [FLAGS ...] [LIBS ...]): one room of the architecture as an object library.
# The rooms of the core are linked together into the library `anchorkv` (src/CMakeLists.txt).
add_library(anchorkv_flags INTERFACE)
target_compile_features(anchorkv_flags INTERFACE cxx_std_20)
target_compile_options(anchorkv_flags INTERFACE
  $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Wall -Wextra $<$<BOOL:${ANCHORKV_WERROR}>:-Werror>>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra $<$<BOOL:${ANCHORKV_WERROR}>:-Werror=all-warnings>>)
# g++ 12 sees an overlap in inlined std::string concatenations that is not there (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(anchorkv_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(ANCHORKV_SANITIZE)
  target_compile_options(anchorkv_flags INTERFACE
    $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-fsanitize=${ANCHORKV_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  target_link_options(anchorkv_flags INTERFACE -fsanitize=${ANCHORKV_SANITIZE})
endif()

# The library and the programs are free of silent conversions too (GCC's warning; clang's of that name asks for more).
add_library(anchorkv_strict_flags INTERFACE)
target_link_libraries(anchorkv_strict_flags INTERFACE anchorkv_flags)
target_compile_options(anchorkv_strict_flags INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wconversion>)

function(anchorkv_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;FLAGS;LIBS" ${ARGN})
  add_library(anchorkv_${name} OBJECT ${ROOM_SOURCES})
  target_include_directories(anchorkv_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  target_compile_options(anchorkv_${name} PRIVATE ${ROOM_FLAGS})
  target_link_libraries(anchorkv_${name} PUBLIC ${ROOM_LIBS} PRIVATE $<BUILD_INTERFACE:anchorkv_strict_flags>)
endfunction()
