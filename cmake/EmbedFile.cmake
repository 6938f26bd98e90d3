# cmake -DINPUT=<file> -DOUTPUT=<file.cc> -DNAME=<array> -P EmbedFile.cmake: a file as an array of
# the library.
file(READ "${INPUT}" hex HEX)
string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE "${OUTPUT}" "namespace hotplane {
extern const unsigned char ${NAME}[];
alignas(64) const unsigned char ${NAME}[] = {
${bytes}};
}  // namespace hotplane
")
