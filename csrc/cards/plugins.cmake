# The plug-ins with kernels for real cards, each by its vendor's compiler: DFLASH_CUDA and
# DFLASH_HIP name them (.ci/plugins finds and installs them). Host code is compiled as everywhere; a
# vendor's compiler only makes the images that are embedded: one of the kernels that compute and
# exchange, and one, for a plug-in of its own, of the kernel that measures.
# SPDX-License-Identifier: Apache-2.0

set(gpu_kernels ${CMAKE_CURRENT_SOURCE_DIR}/cards/entry/kernels.cu)
file(GLOB gpu_kernel_headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cards/kernels/*.h
     ${CMAKE_CURRENT_SOURCE_DIR}/cards/device_exchange/kernels/*.h)
list(APPEND gpu_kernel_headers ${CMAKE_CURRENT_SOURCE_DIR}/cards/portable.h ${CMAKE_CURRENT_SOURCE_DIR}/cards/kernel_params.h
     ${CMAKE_CURRENT_SOURCE_DIR}/cards/device_exchange/step_params.h ${CMAKE_CURRENT_SOURCE_DIR}/wire/frame_layout.h
     ${CMAKE_CURRENT_SOURCE_DIR}/wire/payload_layout.h ${CMAKE_CURRENT_SOURCE_DIR}/wire/limits.h
     ${CMAKE_CURRENT_SOURCE_DIR}/transport/ring/ring_words.h ${CMAKE_CURRENT_SOURCE_DIR}/base/checksum_definition.h
     ${CMAKE_CURRENT_SOURCE_DIR}/base/error_code.h ${CMAKE_CURRENT_SOURCE_DIR}/base/dtype.h
     ${CMAKE_CURRENT_SOURCE_DIR}/cards/kernel_table.h ${CMAKE_CURRENT_SOURCE_DIR}/compute/experts/activation.h)
set(bell_kernel_headers ${CMAKE_CURRENT_SOURCE_DIR}/cards/portable.h ${CMAKE_CURRENT_SOURCE_DIR}/measure/bells/ring_bells.h
    ${CMAKE_CURRENT_SOURCE_DIR}/measure/bells/bell_params.h)

# plugin(NAME SOURCES...): libdflash_NAME.so, which exports nothing but its tables.
function(plugin name)
  add_library(dflash_${name} MODULE EXCLUDE_FROM_ALL ${ARGN})
  target_link_libraries(dflash_${name} PRIVATE dflash_plugin dflash_gpu)
  target_link_options(dflash_${name} PRIVATE -Wl,-z,defs -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/plugin.map)
endfunction()

plugin(sim ${CMAKE_CURRENT_SOURCE_DIR}/cards/entry/sim.cc)
target_link_libraries(dflash_sim PRIVATE dflash_device_exchange_sim)

# What measures doorbells: the device's side for any runtime, and the kernel for the simulator.
set(bells ${CMAKE_CURRENT_SOURCE_DIR}/measure/bells)
add_library(dflash_bells STATIC EXCLUDE_FROM_ALL ${bells}/gpu_bells.cc)
target_link_libraries(dflash_bells PUBLIC dflash_gpu ${CMAKE_DL_LIBS})
add_library(dflash_bells_sim STATIC EXCLUDE_FROM_ALL ${bells}/sim_bells.cc)
target_link_libraries(dflash_bells_sim PUBLIC dflash_bells dflash_gpu_sim)
if(DFLASH_SANITIZE MATCHES "thread")  # as the simulator's own sources, see CMakeLists.txt
  set_source_files_properties(${bells}/sim_bells.cc PROPERTIES COMPILE_OPTIONS -fno-sanitize=thread)
endif()

# measuring_plugin(NAME SOURCES...): libdflash_NAME_measure.so.
function(measuring_plugin name)
  plugin(${name}_measure ${ARGN})
  target_link_libraries(dflash_${name}_measure PRIVATE dflash_bells)
  target_compile_definitions(dflash_${name}_measure PRIVATE DFLASH_VERSION="${DFLASH_VERSION}")
endfunction()

measuring_plugin(sim ${bells}/entry_sim.cc)
target_link_libraries(dflash_sim_measure PRIVATE dflash_bells_sim)

file(GLOB gpu_module_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cards/module/*.cc
     ${CMAKE_CURRENT_SOURCE_DIR}/cards/cuda/*.cc ${CMAKE_CURRENT_SOURCE_DIR}/cards/hip/*.cc)
add_library(dflash_gpu_module STATIC EXCLUDE_FROM_ALL ${gpu_module_sources})
target_link_libraries(dflash_gpu_module PUBLIC dflash_gpu ${CMAKE_DL_LIBS})

set(DFLASH_CUDA "" CACHE STRING "Path of nvcc; empty: no plug-in for NVIDIA's cards")
set(DFLASH_CUDA_ARCHS "75;80;86;89;90a;100;120" CACHE STRING "Architectures; PTX of the first of them from 80 on comes along")
set(DFLASH_HIP "" CACHE STRING "Path of a clang++ that compiles HIP; empty: no plug-in for AMD's cards")
set(DFLASH_HIP_ARCHS "gfx906;gfx908;gfx90a;gfx1030;gfx1100;gfx942;gfx1201" CACHE STRING "Architectures")
set(DFLASH_HIP_INCLUDE "/usr/include" CACHE PATH "Folder of hip/hip_runtime.h")
set(DFLASH_HIP_BITCODE "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode" CACHE PATH "Folder of ROCm's device libraries")

if(DFLASH_CUDA)
  # Images of a toolkit run on every driver of its major version and later.
  execute_process(COMMAND ${DFLASH_CUDA} --version OUTPUT_VARIABLE cuda_version)
  if(NOT cuda_version MATCHES "release ([0-9]+)\\.")
    message(FATAL_ERROR "${DFLASH_CUDA} --version names no release")
  endif()
  set(cuda_major ${CMAKE_MATCH_1})
  # Images in the new format load from driver 550 on: too late for what a toolkit 12 promises.
  set(cuda_compression "")
  if(cuda_major GREATER_EQUAL 13)
    set(cuda_compression --compress-mode=size)
  endif()
  # A card of 9.0 runs the image of 90a too, and which of both a driver takes is nowhere promised.
  set(cuda_has_sm90a false)
  if("90a" IN_LIST DFLASH_CUDA_ARCHS)
    set(cuda_has_sm90a true)
    list(REMOVE_ITEM DFLASH_CUDA_ARCHS 90)
  endif()
  set(cuda_targets "")
  set(cuda_least 1000)
  foreach(arch ${DFLASH_CUDA_ARCHS})
    list(APPEND cuda_targets -gencode arch=compute_${arch},code=sm_${arch})
    string(REGEX MATCH "^[0-9]+" number ${arch})
    if(number LESS cuda_least)
      set(cuda_least ${number})
    endif()
    # PTX is for the cards that no image covers, such as Thor's 11.0: the older it is the more of
    # them take it, and from 80 on it has every instruction but those of a variant.
    if(arch STREQUAL number AND
       (NOT cuda_ptx OR (cuda_ptx LESS 80 AND number GREATER cuda_ptx) OR (number GREATER_EQUAL 80 AND number LESS cuda_ptx)))
      set(cuda_ptx ${number})
    endif()
  endforeach()
  if(cuda_ptx)
    list(APPEND cuda_targets -gencode arch=compute_${cuda_ptx},code=compute_${cuda_ptx})
  endif()
  # cuda_plugin(NAME ENTRY KERNELS HEADERS...): a plug-in with the image of one source of kernels.
  function(cuda_plugin name entry kernels)
    set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}_kernels.fatbin)
    add_custom_command(OUTPUT ${image}
      # expt-relaxed-constexpr: kernels call constexpr functions of headers that the host has too.
      # clang lets them without being asked.
      COMMAND ${DFLASH_CUDA} -O3 -std=c++20 -fmad=false --expt-relaxed-constexpr ${cuda_compression} --threads 0 -I${CMAKE_CURRENT_SOURCE_DIR} ${cuda_targets} -fatbin
              ${kernels} -o ${image}
      DEPENDS ${kernels} ${ARGN} VERBATIM COMMENT "Compiling ${name}'s kernels for ${DFLASH_CUDA_ARCHS}")
    target_sources(dflash_${name} PRIVATE ${image})
    target_link_libraries(dflash_${name} PRIVATE dflash_gpu_module)
    target_compile_definitions(dflash_${name} PRIVATE DFLASH_CUDA_IMAGE="${image}" DFLASH_CUDA_MAJOR=${cuda_major}
                               DFLASH_CUDA_LEAST_ARCH=${cuda_least} DFLASH_CUDA_HAS_SM90A=${cuda_has_sm90a})
    set_source_files_properties(${entry} PROPERTIES OBJECT_DEPENDS ${image})
  endfunction()
  plugin(cuda ${CMAKE_CURRENT_SOURCE_DIR}/cards/entry/cuda.cc)
  target_link_libraries(dflash_cuda PRIVATE dflash_device_exchange)
  cuda_plugin(cuda ${CMAKE_CURRENT_SOURCE_DIR}/cards/entry/cuda.cc ${gpu_kernels} ${gpu_kernel_headers})
  measuring_plugin(cuda ${bells}/entry_cuda.cc)
  cuda_plugin(cuda_measure ${bells}/entry_cuda.cc ${bells}/kernels.cu ${bell_kernel_headers})
endif()

if(DFLASH_HIP)
  # The device libraries of a distribution name each architecture in a file of one constant, and may
  # lack the newest: those are made here.
  set(hip_bitcode ${CMAKE_CURRENT_BINARY_DIR}/hip_bitcode)
  file(MAKE_DIRECTORY ${hip_bitcode})
  file(GLOB bitcode_files ${DFLASH_HIP_BITCODE}/*.bc)
  foreach(file ${bitcode_files})
    get_filename_component(file_name ${file} NAME)
    file(CREATE_LINK ${file} ${hip_bitcode}/${file_name} SYMBOLIC)
  endforeach()
  execute_process(COMMAND ${DFLASH_HIP} -print-resource-dir OUTPUT_VARIABLE hip_resources OUTPUT_STRIP_TRAILING_WHITESPACE)
  foreach(arch ${DFLASH_HIP_ARCHS})
    string(REGEX REPLACE "^gfx" "" number ${arch})
    if(NOT EXISTS ${hip_bitcode}/oclc_isa_version_${number}.bc)
      string(REGEX MATCH "^(.*)(.)(.)$" parts ${number})
      math(EXPR version "${CMAKE_MATCH_1} * 1000 + 0x${CMAKE_MATCH_2} * 100 + 0x${CMAKE_MATCH_3}")
      file(WRITE ${hip_bitcode}/isa_${number}.cl "__constant const unsigned __oclc_ISA_version = ${version};\n")
      execute_process(COMMAND ${DFLASH_HIP} -x cl -cl-std=CL2.0 -target amdgcn-amd-amdhsa -nogpulib -mcode-object-version=4 -emit-llvm -c ${hip_bitcode}/isa_${number}.cl
                              -o ${hip_bitcode}/oclc_isa_version_${number}.bc RESULT_VARIABLE failed)
      if(failed)
        message(FATAL_ERROR "no device library for ${arch} could be made with ${DFLASH_HIP}")
      endif()
    endif()
  endforeach()
  # hip_plugin(NAME ENTRY KERNELS HEADERS...): a plug-in with a code object of one source of kernels
  # per architecture.
  function(hip_plugin name entry kernels)
    set(objects "")
    set(list "// One line per architecture, by csrc/cards/plugins.cmake.\n")
    foreach(arch ${DFLASH_HIP_ARCHS})
      set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}_kernels_${arch}.hsaco)
      # Code objects of version 4 load from ROCm 4.1 to 7; clang's own choice is what is newest.
      add_custom_command(OUTPUT ${object}
        COMMAND ${DFLASH_HIP} -x hip --cuda-device-only --no-gpu-bundle-output --offload-arch=${arch} -O3 -std=c++20 -ffp-contract=off
                -fno-strict-aliasing -mcode-object-version=4 -D__HIP_PLATFORM_AMD__ -nogpuinc -isystem ${hip_resources}
                -idirafter ${DFLASH_HIP_INCLUDE} -I${CMAKE_CURRENT_SOURCE_DIR} --rocm-device-lib-path=${hip_bitcode} -c ${kernels} -o ${object}
        DEPENDS ${kernels} ${ARGN} VERBATIM COMMENT "Compiling ${name}'s kernels for ${arch}")
      list(APPEND objects ${object})
      string(APPEND list "DFLASH_HIP_OBJECT(${arch}, \"${object}\")\n")
    endforeach()
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}_objects.inc CONTENT "${list}" @ONLY)
    target_link_libraries(dflash_${name} PRIVATE dflash_gpu_module)
    target_compile_definitions(dflash_${name} PRIVATE DFLASH_HIP_OBJECTS="${CMAKE_CURRENT_BINARY_DIR}/${name}_objects.inc")
    set_source_files_properties(${entry} PROPERTIES OBJECT_DEPENDS "${objects}")
  endfunction()
  plugin(hip ${CMAKE_CURRENT_SOURCE_DIR}/cards/entry/hip.cc)
  target_link_libraries(dflash_hip PRIVATE dflash_device_exchange)
  hip_plugin(hip ${CMAKE_CURRENT_SOURCE_DIR}/cards/entry/hip.cc ${gpu_kernels} ${gpu_kernel_headers})
  measuring_plugin(hip ${bells}/entry_hip.cc)
  hip_plugin(hip_measure ${bells}/entry_hip.cc ${bells}/kernels.cu ${bell_kernel_headers})
endif()
