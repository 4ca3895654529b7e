# The plug-in for llama.cpp's own programs, built against the headers of exactly the user's
# llama.cpp: nothing of it is kept here. DFLASH_GGML names the folder that has ggml/include and
# ggml/src; without it neither plug-in nor its tests exist.
#
#   dflash_ggml_plugin        the room csrc/ggml_plugin, which knows the client by dflash_moe.h only
#   ggml-dflash-moe           the plug-in, one exported symbol (make ggml)
#   dflash_ggml_record        prints what was built for what
# SPDX-License-Identifier: Apache-2.0
set(DFLASH_GGML "" CACHE PATH "Sources of a llama.cpp, or its headers alone (.ci/ggml_headers)")
set(DFLASH_GGML_COMMIT "unknown" CACHE STRING "Its commit, as ggml_commit() says it")
set(DFLASH_GGML_TAG "" CACHE STRING "Its release, for the record only")
if(NOT DFLASH_GGML AND EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/../build/ggml_headers/complete)
  set(DFLASH_GGML ${CMAKE_CURRENT_SOURCE_DIR}/../build/ggml_headers)
endif()

# A folder that is gone since must not keep the core from being built in the same build folder;
# .ci/ggml says what is wrong with one that it is given.
if(DFLASH_GGML AND EXISTS ${DFLASH_GGML}/ggml/src/ggml-backend-impl.h)
  # ggml states its version in its own build file, in three variables.
  file(STRINGS ${DFLASH_GGML}/ggml/CMakeLists.txt ggml_version_lines REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+\\)")
  string(REGEX MATCHALL "[0-9]+" ggml_version_numbers "${ggml_version_lines}")
  list(JOIN ggml_version_numbers "." ggml_version)

  file(GLOB ggml_plugin_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/ggml_plugin/*.cc)
  add_library(dflash_ggml_plugin STATIC EXCLUDE_FROM_ALL ${ggml_plugin_sources})
  target_link_libraries(dflash_ggml_plugin PUBLIC dflash_flags ${CMAKE_DL_LIBS})
  target_include_directories(dflash_ggml_plugin SYSTEM PUBLIC ${DFLASH_GGML}/ggml/include ${DFLASH_GGML}/ggml/src)
  # What some releases lack. Enumerators cannot be asked for in the language itself.
  file(STRINGS ${DFLASH_GGML}/ggml/include/ggml.h ggml_newer_names REGEX "^ *GGML_(GLU_OP_SWIGLU_CLAMP|TENSOR_FLAG_COMPUTE)[ ,=]")
  if(ggml_newer_names MATCHES "GLU_OP_SWIGLU_CLAMP")
    target_compile_definitions(dflash_ggml_plugin PUBLIC DFLASH_GGML_HAS_SWIGLU_CLAMP)
  endif()
  if(ggml_newer_names MATCHES "TENSOR_FLAG_COMPUTE")
    target_compile_definitions(dflash_ggml_plugin PUBLIC DFLASH_GGML_HAS_COMPUTE_FLAG)
  endif()
  set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/ggml_plugin/build_record.cc PROPERTIES COMPILE_DEFINITIONS
    "DFLASH_GGML_VERSION=\"${ggml_version}\";DFLASH_GGML_COMMIT=\"${DFLASH_GGML_COMMIT}\";DFLASH_GGML_TAG=\"${DFLASH_GGML_TAG}\"")

  # ggml_plugin_module(NAME CLIENT...): the plug-in over an implementation of dflash_moe.h.
  function(ggml_plugin_module name)
    add_library(${name} MODULE EXCLUDE_FROM_ALL ${CMAKE_CURRENT_SOURCE_DIR}/ggml_plugin/entry/backend_entry.cc)
    target_link_libraries(${name} PRIVATE dflash_ggml_plugin ${ARGN})
    # Never unloaded: ggml keeps pointers into it, and the client has threads.
    target_link_options(${name} PRIVATE LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/ggml_plugin.map LINKER:-z,nodelete
      LINKER:--exclude-libs,ALL)
    set_target_properties(${name} PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cmake/ggml_plugin.map)
  endfunction()

  if(TARGET dflash_c_interface)
    ggml_plugin_module(ggml-dflash-moe dflash_c_interface)
  endif()
  add_executable(dflash_ggml_record EXCLUDE_FROM_ALL ${CMAKE_CURRENT_SOURCE_DIR}/ggml_plugin/entry/write_record.cc)
  target_link_libraries(dflash_ggml_record PRIVATE dflash_ggml_plugin)
endif()
