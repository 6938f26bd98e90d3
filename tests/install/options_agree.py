#!/usr/bin/env python3
"""options_agree.py HOTPLANE MAN COMPLETION: the commands and options that the program's --help
lists are exactly those of the man page and of the bash completion."""
import re
import subprocess
import sys
from pathlib import Path

LONG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def help_options(program, command):
    text = subprocess.run([program, command, "--help"], capture_output=True, text=True,
                          check=True).stdout
    # The option column only: descriptions and examples may speak of other commands' options.
    columns = re.findall(r"^  (-\S.*?)(?:  |$)", text, re.M)
    return {option for column in columns for option in LONG.findall(column)}


def man_options(text):
    """{command: options} of the sections `.SS command`; "" holds the options of all commands."""
    text = text.replace("\\-", "-")
    general = text.split('.SH "GENERAL OPTIONS"')[1].split(".SH")[0]
    found = {"": {o for tag in tags(general) for o in LONG.findall(tag)}}
    commands = text.split(".SH COMMANDS")[1].split(".SH")[0]
    for section in re.split(r"^\.SS ", commands, flags=re.M)[1:]:
        name, _, body = section.partition("\n")
        found[name.strip()] = {o for tag in tags(body) for o in LONG.findall(tag)}
    return found


def tags(text):
    return re.findall(r"^\.TP\n(.*)$", text, re.M)


def completion_options(path, command):
    script = (f"source {path}; COMP_WORDS=(hotplane {command} --); COMP_CWORD=2; _hotplane; "
              'printf "%s\\n" "${COMPREPLY[@]}"')
    return set(subprocess.run(["bash", "-c", script], capture_output=True, text=True,
                              check=True).stdout.split())


def completion_commands(path):
    script = (f'source {path}; COMP_WORDS=(hotplane ""); COMP_CWORD=1; _hotplane; '
              'printf "%s\\n" "${COMPREPLY[@]}"')
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True,
                           check=True).stdout.split()
    return {word for word in words if not word.startswith("-")}


def main():
    program, man_path, completion = sys.argv[1:]
    man = man_options(Path(man_path).read_text(encoding="utf-8"))
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  ([a-z]+) ", text.split("ubcommands:")[1], re.M))
    differences = 0

    def compare(what, told, where, documented):
        nonlocal differences
        for option in sorted(told - documented):
            print(f"{what}: {option} is in --help, not in the {where}")
        for option in sorted(documented - told):
            print(f"{what}: {option} is in the {where}, not in --help")
        differences += len(told ^ documented)

    compare("commands", commands, "man page", set(man) - {""})
    compare("commands", commands, "completion", completion_commands(completion))
    for command in sorted(commands):
        told = help_options(program, command)
        compare(command, told, "man page", man.get(command, set()) | man[""])
        compare(command, told, "completion", completion_options(completion, command))
    print(f"{len(commands)} commands compared, {differences} differences")
    return 1 if differences or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
