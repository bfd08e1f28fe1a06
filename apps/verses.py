#!/usr/bin/env python3
"""Texts of apps/chat.sh from verses as the program `bible -f` prints them, "Ge1:1 In the beginning ...":

    verses.py write VERSES DIR [--chats N]   DIR/text.txt: all verses, a line each, a blank line before a
                                             chapter. DIR/chats.jsonl: conversations about N of them.
    verses.py draw DIR --seed S --count N    DIR/questions.txt, DIR/answers.txt: N of those verses

A question names book, chapter and verse, its answer is the verse. Asked are short verses whose words
stand in one place only, spread evenly over the text. Each of them is once a conversation of its own, and
once in each of several passes in which conversations have three questions, in an order that is drawn.
"""
import argparse
import collections
import json
import pathlib
import random
import re
import sys

BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra",
    "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalm", "Prv": "Proverbs",
    "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah", "Jer": "Jeremiah",
    "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum",
    "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi",
    "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans",
    "1Cor": "1 Corinthians", "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians",
    "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians", "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews",
    "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John",
    "3Jn": "3 John", "Jude": "Jude", "Rev": "Revelation"}
LONGEST = 60  # characters of an answer
TURNS, PASSES = 3, 4


def read_verses(path):
    """[(book, chapter, verse, words)]"""
    verses = []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)", line.rstrip("\n"))
        if not match or match[1] not in BOOKS:
            sys.exit(f"verses: {path}:{number}: {line.rstrip()!r}, expected a verse such as "
                     "'Ge1:1 In the beginning God created the heaven and the earth.'")
        verses.append((BOOKS[match[1]], int(match[2]), int(match[3]), match[4].strip()))
    return verses


def write(verses, folder, num_chats):
    folder.mkdir(parents=True, exist_ok=True)
    times = collections.Counter(words for *_, words in verses)
    short = [v for v in verses if len(v[3]) <= LONGEST and times[v[3]] == 1]
    if len(short) < num_chats:
        sys.exit(f"verses: --chats {num_chats}, expected at most {len(short)}: as many verses have at most "
                 f"{LONGEST} characters and words of their own")
    asked = [short[i * len(short) // num_chats] for i in range(num_chats)]
    pairs = [(f"What does {book} {chapter}:{verse} say?", words) for book, chapter, verse, words in asked]
    chats = [[pair] for pair in pairs]
    draw = random.Random(1)
    for _ in range(PASSES):
        order = draw.sample(pairs, len(pairs))
        chats += [order[i:i + TURNS] for i in range(0, len(order), TURNS)]
    with open(folder / "text.txt", "w", encoding="utf-8") as file:
        for _, _, verse, words in verses:
            file.write(("\n" if verse == 1 else "") + words + "\n")
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for chat in chats:
            messages = [{"role": role, "content": text}
                        for pair in chat for role, text in zip(("user", "assistant"), pair)]
            file.write(json.dumps({"messages": messages}) + "\n")


def draw(folder, seed, count):
    rows = [json.loads(line)["messages"] for line in open(folder / "chats.jsonl", encoding="utf-8")]
    pairs = [(row[0]["content"], row[1]["content"]) for row in rows if len(row) == 2]
    if count > len(pairs):
        sys.exit(f"verses: --count {count}, expected at most the {len(pairs)} verses of the conversations")
    drawn = random.Random(seed).sample(pairs, count)
    for name, column in (("questions.txt", 0), ("answers.txt", 1)):
        (folder / name).write_text("".join(pair[column] + "\n" for pair in drawn), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    of_write = commands.add_parser("write")
    of_write.add_argument("verses")
    of_write.add_argument("folder", type=pathlib.Path)
    of_write.add_argument("--chats", type=int, default=300)
    of_draw = commands.add_parser("draw")
    of_draw.add_argument("folder", type=pathlib.Path)
    of_draw.add_argument("--seed", type=int, required=True)
    of_draw.add_argument("--count", type=int, required=True)
    args = parser.parse_args()
    if args.command == "write":
        write(read_verses(args.verses), args.folder, args.chats)
    else:
        draw(args.folder, args.seed, args.count)


if __name__ == "__main__":
    main()
