# `cmake --install`: libanchorkv.so (the C interface), libanchorkv.a, their headers, a CMake package
# (find_package(anchorkv), targets anchorkv::shared and anchorkv::anchorkv), a pkg-config file and, where it was built,
# the program.
#
# <include>/anchorkv/ holds the public headers. The codec, cache and backend interfaces below src/ are part of
# the C++ interface too; they keep their paths ("codec/codec.h") under <include>/anchorkv/core, which the target
# adds to the include path, so that no general name lands in the include directory itself.
include(CMakePackageConfigHelpers)

set(ANCHORKV_INSTALL_CORE ${CMAKE_INSTALL_INCLUDEDIR}/anchorkv/core)
set(ANCHORKV_INSTALL_CMAKE ${CMAKE_INSTALL_LIBDIR}/cmake/anchorkv)

target_compile_features(anchorkv PUBLIC cxx_std_20)
target_include_directories(anchorkv PUBLIC $<INSTALL_INTERFACE:${ANCHORKV_INSTALL_CORE}>)
# In the build tree Highway reaches the library through its room; an installed static library must name it.
target_link_libraries(anchorkv PRIVATE $<INSTALL_INTERFACE:hwy::hwy>)

install(TARGETS anchorkv anchorkv_shared EXPORT anchorkvTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/anchorkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library
  FILES_MATCHING PATTERN "*.h")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/base ${PROJECT_SOURCE_DIR}/src/format ${PROJECT_SOURCE_DIR}/src/segment
  DESTINATION ${ANCHORKV_INSTALL_CORE} COMPONENT library FILES_MATCHING PATTERN "*.h")
foreach(header backend/backend.h codec/codec.h cache/kv_cache.h)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${PROJECT_SOURCE_DIR}/src/${header} DESTINATION ${ANCHORKV_INSTALL_CORE}/${folder} COMPONENT library)
endforeach()

install(EXPORT anchorkvTargets NAMESPACE anchorkv:: DESTINATION ${ANCHORKV_INSTALL_CMAKE} COMPONENT library)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/anchorkvConfig.cmake.in
  ${PROJECT_BINARY_DIR}/anchorkvConfig.cmake INSTALL_DESTINATION ${ANCHORKV_INSTALL_CMAKE})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/anchorkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/anchorkvConfig.cmake ${PROJECT_BINARY_DIR}/anchorkvConfigVersion.cmake
  DESTINATION ${ANCHORKV_INSTALL_CMAKE} COMPONENT library)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)

# pkg-config: the shared library; with --static what libanchorkv.a needs besides.
file(RELATIVE_PATH ANCHORKV_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" ANCHORKV_PC_PREFIX "${ANCHORKV_PC_PREFIX}")
set(ANCHORKV_PC_PRIVATE "-lhwy -lgomp -lstdc++ -lm -lpthread")
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  string(REPLACE gomp omp ANCHORKV_PC_PRIVATE "${ANCHORKV_PC_PRIVATE}")
endif()
if(ANCHORKV_CUDA)
  string(APPEND ANCHORKV_PC_PRIVATE " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/anchorkv.pc.in ${PROJECT_BINARY_DIR}/anchorkv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/anchorkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)

if(TARGET anchorkv_cli)
  install(TARGETS anchorkv_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
  # What is linked into the program.
  foreach(name llama.cpp cpp-httplib)
    install(FILES ${ANCHORKV_LLAMA_PREFIX}/share/${name}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR}
      RENAME LICENSE.${name} COMPONENT program OPTIONAL)
  endforeach()
  file(GLOB pages ${PROJECT_SOURCE_DIR}/docs/man/*.1)
  if(pages)
    install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT program)
  endif()
endif()
