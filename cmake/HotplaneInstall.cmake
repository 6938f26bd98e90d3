# The two libraries, made of the objects of every folder but the command line, and what is
# installed.

get_property(HP_LIBRARY_FOLDERS GLOBAL PROPERTY hp_folders)
list(REMOVE_ITEM HP_LIBRARY_FOLDERS cli)

set(HP_SOVERSION ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(HP_SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

set(HP_MAP "${PROJECT_SOURCE_DIR}/cmake/hotplane.map")
add_library(hotplane_shared SHARED)
set_target_properties(hotplane_shared PROPERTIES
  EXPORT_NAME hotplane VERSION ${PROJECT_VERSION} SOVERSION ${HP_SOVERSION} LINK_DEPENDS ${HP_MAP})
hp_link(hotplane_shared ${HP_LIBRARY_FOLDERS})
target_link_options(hotplane_shared PRIVATE LINKER:--version-script=${HP_MAP})
if(NOT HOTPLANE_SANITIZE)
  target_link_options(hotplane_shared PRIVATE LINKER:-z,defs)
endif()
hp_own_runtime(hotplane_shared)

add_library(hotplane_static STATIC)
set(HP_PRIVATE_LIBRARIES stdc++ pthread)
foreach(folder ${HP_LIBRARY_FOLDERS})
  target_sources(hotplane_static PRIVATE $<TARGET_OBJECTS:hp_${folder}>)
  get_target_property(links hp_${folder} LINK_LIBRARIES)
  if(links MATCHES "uring")
    target_link_libraries(hotplane_static INTERFACE uring)
    list(APPEND HP_PRIVATE_LIBRARIES uring)
  endif()
endforeach()
target_link_libraries(hotplane_static INTERFACE Threads::Threads)

foreach(library hotplane_shared hotplane_static)
  set_target_properties(${library} PROPERTIES
    OUTPUT_NAME hotplane LINKER_LANGUAGE CXX
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib
    ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  target_compile_features(${library} INTERFACE cxx_std_17)
  target_include_directories(${library} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()
add_library(hotplane::hotplane ALIAS hotplane_shared)
add_library(hotplane::hotplane_static ALIAS hotplane_static)

include(CMakePackageConfigHelpers)
set(HP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/hotplane)
configure_package_config_file(cmake/hotplaneConfig.cmake.in
  ${PROJECT_BINARY_DIR}/packaging/hotplaneConfig.cmake INSTALL_DESTINATION ${HP_CMAKE_DIR})
set(HP_COMPATIBILITY SameMajorVersion)
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(HP_COMPATIBILITY SameMinorVersion)
endif()
write_basic_package_version_file(${PROJECT_BINARY_DIR}/packaging/hotplaneConfigVersion.cmake
  COMPATIBILITY ${HP_COMPATIBILITY})

list(TRANSFORM HP_PRIVATE_LIBRARIES PREPEND "-l")
list(JOIN HP_PRIVATE_LIBRARIES " " HOTPLANE_PC_PRIVATE)
# Relative, so that an installed tree can be moved.
file(RELATIVE_PATH HOTPLANE_PC_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/hotplane.pc.in ${PROJECT_BINARY_DIR}/packaging/hotplane.pc @ONLY)

# The command line carries its own C++ runtime: it runs where only the binary was copied.
if(TARGET hotplane_cli)
  set_target_properties(hotplane_cli PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  hp_own_runtime(hotplane_cli)
  install(TARGETS hotplane_cli)
endif()

install(TARGETS hotplane_shared hotplane_static EXPORT hotplane)
install(EXPORT hotplane FILE hotplaneTargets.cmake NAMESPACE hotplane:: DESTINATION ${HP_CMAKE_DIR})
install(DIRECTORY include/hotplane DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_BINARY_DIR}/packaging/hotplaneConfig.cmake
  ${PROJECT_BINARY_DIR}/packaging/hotplaneConfigVersion.cmake DESTINATION ${HP_CMAKE_DIR})
install(FILES ${PROJECT_BINARY_DIR}/packaging/hotplane.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES docs/man/hotplane.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES tools/completion/hotplane.bash
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME hotplane)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
