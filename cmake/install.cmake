# What `cmake --install` puts below the prefix. The tree can be moved afterwards: nothing in it names the prefix.
#
#   component nvte_ep             lib/libnvte_ep.so.1, include/nvte_ep, bin/nvte-ep, lib/cmake/nvte_ep, licences
#   component transformer_engine  lib/nvte_ep/te/libtransformer_engine.so, in a folder of its own so that nobody finds it
#                                 unasked; lib/libnvte_ep_preload.so.1; include/nvte_ep/te
#   component host                lib/libnvte_ep_host.so.1, include/nvte_ep_host; lib/nvte_ep/host_runtime has it under the
#                                 names of CUDA's and NCCL's libraries
#
# Each has its pkg-config file. The first is what the others build on; `cmake --install` without --component installs all.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(docs_dir ${CMAKE_INSTALL_DATAROOTDIR}/doc/nvte-ep)

# nvte_ep_install_library(COMPONENT FILE NAME): FILE as NAME.so.1, and the link NAME.so.
function(nvte_ep_install_library component file name)
  install(FILES ${nvte_ep_library_dir}/${file}
    DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${name}.so.1 COMPONENT ${component})
  nvte_ep_install_link(${component} ${name}.so.1 ${CMAKE_INSTALL_LIBDIR}/${name}.so)
endfunction()

# nvte_ep_install_link(COMPONENT TARGET PATH): a symbolic link at PATH below the prefix. It is made in the build folder and
# installed as a file, so that it is in the manifest, by which the target `uninstall` removes what was installed.
function(nvte_ep_install_link component target path)
  set(link ${PROJECT_BINARY_DIR}/links/${path})
  get_filename_component(folder ${path} DIRECTORY)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/links/${folder})
  file(CREATE_LINK ${target} ${link} SYMBOLIC)
  install(FILES ${link} DESTINATION ${folder} COMPONENT ${component})
endfunction()

# nvte_ep_install_pc(COMPONENT): its pkg-config file.
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
function(nvte_ep_install_pc component pc)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${pc}.pc.in ${PROJECT_BINARY_DIR}/${pc}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${pc}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT ${component})
endfunction()

# ---- nvte_ep ----

if(nvte_ep_full)
  nvte_ep_install_library(nvte_ep libnvte_ep.so libnvte_ep)
else()
  nvte_ep_install_library(nvte_ep libnvte_ep_stub.so libnvte_ep)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/nvte_ep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT nvte_ep
  PATTERN nvte_ep/te EXCLUDE)
install(PROGRAMS ${nvte_ep_library_dir}/nvte-ep DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT nvte_ep)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY_LICENSES
  ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md ${PROJECT_SOURCE_DIR}/CONTRIBUTING.md
  DESTINATION ${docs_dir} COMPONENT nvte_ep)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs ${PROJECT_SOURCE_DIR}/examples DESTINATION ${docs_dir} COMPONENT nvte_ep
  PATTERN book.toml EXCLUDE PATTERN book.css EXCLUDE)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/rust/examples DESTINATION ${docs_dir}/rust COMPONENT nvte_ep)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/cli/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT nvte_ep)
set(completions ${PROJECT_SOURCE_DIR}/cli/completions)
install(FILES ${completions}/nvte-ep.bash
  DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/bash-completion/completions RENAME nvte-ep COMPONENT nvte_ep)
install(FILES ${completions}/_nvte-ep DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/zsh/site-functions COMPONENT nvte_ep)
install(FILES ${completions}/nvte-ep.fish
  DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/fish/vendor_completions.d COMPONENT nvte_ep)
nvte_ep_install_pc(nvte_ep nvte_ep)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nvte_ep)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/nvte_epConfig.cmake.in ${PROJECT_BINARY_DIR}/nvte_epConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_BINDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/nvte_epConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/nvte_epConfig.cmake ${PROJECT_BINARY_DIR}/nvte_epConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT nvte_ep)

# ---- transformer_engine ----

if(NVTE_EP_INSTALL_TE_LIBRARY)
  install(FILES ${nvte_ep_library_dir}/libtransformer_engine.so
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/nvte_ep/te COMPONENT transformer_engine)
  # Each library looks for the host runtime beside itself.
  nvte_ep_install_link(host ../../libnvte_ep_host.so.1 ${CMAKE_INSTALL_LIBDIR}/nvte_ep/te/libnvte_ep_host.so)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/nvte_ep/te
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/nvte_ep COMPONENT transformer_engine)
  # What its headers name of the folder above.
  install(FILES ${PROJECT_SOURCE_DIR}/include/nvte_ep/nvte_ep_ext.h ${PROJECT_SOURCE_DIR}/include/nvte_ep/nvte_ep.hpp
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/nvte_ep COMPONENT transformer_engine)
  install(FILES ${PROJECT_SOURCE_DIR}/include/nvte_ep/transformer_engine/transformer_engine.h
    ${PROJECT_SOURCE_DIR}/include/nvte_ep/transformer_engine/wrappers.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/nvte_ep/transformer_engine COMPONENT transformer_engine)
  nvte_ep_install_pc(transformer_engine nvte_ep_te)
endif()
nvte_ep_install_library(transformer_engine libnvte_ep_preload.so libnvte_ep_preload)

# ---- host ----

nvte_ep_install_library(host libnvte_ep_host.so libnvte_ep_host)
foreach(name libcuda.so.1 libcudart.so.12 libcudart.so.13 libnccl.so.2 libnccl_ep.so.0)
  nvte_ep_install_link(host ../../libnvte_ep_host.so.1 ${CMAKE_INSTALL_LIBDIR}/nvte_ep/host_runtime/${name})
endforeach()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/nvte_ep_host DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT host)
nvte_ep_install_pc(host nvte_ep_host)

# ---- uninstall ----

# Another project may have a target of that name.
if(top_level)
  add_custom_target(uninstall
    COMMAND ${CMAKE_COMMAND} -D BINARY_DIR=${PROJECT_BINARY_DIR} -P ${CMAKE_CURRENT_LIST_DIR}/uninstall.cmake
    COMMENT "removing what the last `cmake --install` installed"
    VERBATIM)
endif()
