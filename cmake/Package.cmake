# `cpack`: anchorkv_VERSION_ARCH.deb and anchorkv-VERSION-Linux-ARCH.tar.gz with the program, the libraries and the
# headers. tools/make-package configures a build for it.
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_PACKAGE_NAME anchorkv)
set(CPACK_PACKAGE_VENDOR "The anchorkv authors")
set(CPACK_PACKAGE_CONTACT "The anchorkv authors <maintainers@anchorkv.example>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "answers from long documents with a KV cache that is several times smaller")
set(CPACK_PACKAGE_DESCRIPTION "anchorkv runs GGUF language models on long documents with a compressed KV cache: as a
program, as an OpenAI-compatible server and as a library for C and C++.")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGE_FILE_NAME anchorkv-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
# One package of these components; the Python module has a wheel of its own.
set(CPACK_COMPONENTS_ALL library)
if(TARGET anchorkv_cli)
  list(APPEND CPACK_COMPONENTS_ALL program)
endif()
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/PackageByGenerator.cmake)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# The static library's headers and CMake package need what it was built with; the program and libanchorkv.so do not.
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libhwy-dev, pkg-config")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY >=)
include(CPack)
