"""Writes jinja.json: small templates of every construct that the interpreter of chat templates knows,
with what jinja2 makes of them in the environment of transformers. Usage: make_jinja.py [> jinja.json]
Needs jinja2 >= 3.1.6.
"""

import json

import huggingface_jinja

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Gr\u00fc\u00dfe <b>&'\"\n2nd line  "},
        {"role": "assistant", "content": "  Hi \U0001f600!", "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None, True]}}}]},
        {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": {}, "a": []}}}],
    "add_generation_prompt": True,
    "bos_token": "<s>", "eos_token": "</s>",
    "n": 7, "nil": None, "x": 2.5, "none": None, "empty": [], "d": {"b": 1, "a": 2, "C": 3, "items": "key"},
    "s": "a,b,,c", "names": ["b", "A", "c", "a"], "words": "the quick  brown\tfox",
    "greek": "\u039f\u03a3 \u03a3\u0391 \u01c4\u00df\ufb01", "nested": [[1, 2], [3, [4]]],
    "people": [{"name": "Bo", "age": 3}, {"name": "al", "age": 5}, {"name": "Cy"}],
}

# One a line; what begins with "=" is an expression.
TEMPLATES = r"""
plain text
{{ messages[0].content }}|{{ messages[0]['content'] }}|{{ messages[-1].content[0].text }}
{# a comment #}a{#- b -#} c {#+ d +#} e
a  {%- if true %}  b  {%- endif %}  c
{% raw %}{{ not }} {% this %}{% endraw %} {%- raw -%} {{ x }} {%- endraw -%} z
{% if n > 5 and n < 10 %}in{% elif n == 5 %}five{% else %}out{% endif %}
{% if empty %}a{% elif none %}b{% elif 0 %}c{% elif '' %}d{% elif {} %}e{% else %}f{% endif %}
{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.index0 }} {{ loop.revindex }} {{ loop.revindex0 }} {{ loop.first }} {{ loop.last }} {{ m.role }};{% endfor %}
{% for m in messages %}{{ loop.previtem.role }}<{{ m.role }}>{{ loop.nextitem.role if not loop.last }} {% endfor %}
{% for m in messages %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }},{% endfor %}
{% for a in [] %}x{% else %}none{% endfor %}{% for a in [1] %}x{% else %}none{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }} {% endfor %}{% for k in d %}{{ k }} {% endfor %}
{% for k, v in d|items %}{{ k }}={{ v }} {% endfor %}{% for k, v in d|dictsort %}{{ k }}={{ v }} {% endfor %}
{% for i in range(10) if i % 2 %}{{ i }}{{ loop.index }}{{ loop.last }} {% endfor %}
{% for i in range(10) if i > 20 %}{{ i }}{% else %}nothing{% endfor %}
{% for i in range(6) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in [1] %}{% continue %}{% else %}else{% endfor %}{% for i in [1] %}{% break %}{% else %}else{% endfor %}
{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i // 2) }}{% endfor %}
{% for row in nested recursive %}[{% if row is iterable %}{{ loop(row) }}{% else %}{{ row }}{% endif %}{{ loop.depth }}{{ loop.depth0 }}]{% endfor %}
{% for a, (b, c) in [(1, (2, 3)), (4, [5, 6])] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}
{% for a, b in [(1,)] %}{{ a }}{% endfor %}
{% for a, b in [1] %}{{ a }}{% endfor %}
{% for a in 5 %}{{ a }}{% endfor %}
{% for a in none %}{{ a }}{% endfor %}
{% for a in missing %}{{ a }}{% endfor %}.
{% for c in greek %}{{ c }}-{% endfor %}
{% for i in range(2) %}{% for j in range(2) %}{{ loop.index }}{{ i }}{{ j }} {% endfor %}{{ loop.index }}{% endfor %}
{% set a = 1 %}{% for i in range(3) %}{% set a = i %}{% endfor %}{{ a }}
{% set a = 1 %}{% if true %}{% set a = 2 %}{% endif %}{{ a }}
{% for i in range(2) %}{{ a }}{% set a = i %}{{ a }}{% endfor %}{{ a }}
{% for m in messages %}{{ n }}{% endfor %}{% set n = 1 %}{{ n }}
{{ n }}{% for m in messages %}{{ n }}{% endfor %}{% set n = 1 %}{{ n }}
{% macro f() %}{{ n }}{% endmacro %}{{ f() }}{% set n = 1 %}{{ f() }}
{% if none %}{% set n = 3 %}{% endif %}{{ n }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = 1, %}{{ c }}{% set (e, f) = 'xy' %}{{ e }}{{ f }}
{% set ns = namespace(a=1, b='x') %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{{ ns.c is defined }}{{ ns }}
{% set ns = namespace({'a': 1}, b=2) %}{% set ns.a, ns.b = 5, 6 %}{{ ns.a }}{{ ns.b }}
{% set ns = namespace() %}{% set ns._a = 1 %}
{{ namespace(_a=1) }}
{% set ns = namespace(a=1) %}{% set ns.b = [ns] %}{{ ns }}
{% set d.x = 1 %}
{% set q.x = 1 %}
{% set t %}a{{ n }}b{% endset %}{{ t }}{{ t|length }}
{% set t | upper | replace('A', 'q') %}a{{ n }}b{% endset %}{{ t }}
{% set t %}{% if true %}{% set y = 3 %}{{ y }}{% endif %}{% endset %}{{ t }}{{ y }}
{% for i in range(3) %}{% set t %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endset %}{{ t }}{% endfor %}
{% macro m(a, b=2, c=a) %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}
{% macro m(a) %}{{ varargs }}{{ kwargs }}{{ a }}{% endmacro %}{{ m(1, 2, 3, k=4) }}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(*[1]) }}{{ m(**{'a': 2}) }}
{% macro m(a, b) %}{{ a }}{{ b is defined }}{% endmacro %}{{ m(missing, 1) }}{{ m(1) }}
{% macro f(k) %}{% if k > 0 %}{{ k }}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
{% macro f(k) %}{{ f(k + 1) }}{% endmacro %}{{ f(0) }}
{% macro box(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call box('p') %}in {{ n }}{% endcall %}
{% macro each(l) %}{% for x in l %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(a, b=0) each('xy') %}{{ a }}{{ b }},{% endcall %}
{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}{% call m() %}{% endcall %}
{% macro m() %}x{% endmacro %}{% call m() %}{% endcall %}
{% macro outer() %}{% macro inner() %}{{ n }}{% endmacro %}{{ inner() }}{{ inner }}{% endmacro %}{{ outer() }}{{ outer }}
{% filter upper %}abc {{ messages[0].role }}{% endfilter %}{% filter replace('a', n) %}banana{% endfilter %}
{% filter length %}abc{% endfilter %}
{% call range(3) %}{% endcall %}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% set a = 3 %}{{ a }}{% endwith %}{{ a }}
{% set a = 9 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% print 1, 'a', n %}
{% include 'x' %}
{% if false %}{% include 'x' %}{% endif %}fine
{% break %}
{% for i in [1] %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{% for i in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}
{% for loop in [1] %}{% endfor %}
{% for i in [1] %}{% set loop = 2 %}{% endfor %}
{% unknown %}
{% if true %}
{% endif %}
{{ 1 +
{{ 'open
{{ (1] }}
{{ 1 2 }}
{% for x in %}{% endfor %}
{{ }}
{{ x is }}
{{ 5 is divisibleby 2 is true }}
{{ n.real }}{{ 1.0.real }}{{ n.imag }}
{{ -n }}{{ +n }}{{ --n }}{{ not n }}{{ -x }}{{ -true }}
{{ -2 ** 2 }}{{ 2 ** 3 ** 2 }}{{ 2 ** -1 }}{{ (-8) ** 2 }}{{ 2.0 ** 3 }}
{{ -'a' }}
{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 8 / 2 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }}
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 1.0 / 0 }}
{{ 0.0 ** -1 }}
{{ 1 + 'a' }}
{{ 'a' + 1 }}
{{ none + 1 }}
{{ missing + 1 }}
{{ 1 + missing }}
{{ 'a' + 'b' }}{{ [1] + [2] }}{{ (1,) + (2,) }}{{ 'ab' * 3 }}{{ 2 * 'x' }}{{ [0] * 2 }}{{ 'a' * -1 }}
{{ [1] + (2,) }}
{{ 1 + true }}{{ 1.5 + 1 }}{{ 3 - 0.5 }}{{ 2 * 1.5 }}
{{ 1 ~ 'a' ~ none ~ 2.0 ~ [1] ~ missing ~ true }}
{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 1 == 1.0 == true }}{{ 'a' < 'b' }}{{ [1, 2] < [1, 3] }}{{ (1,) < (1, 2) }}{{ 1 != 2 }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ missing < 1 }}
{{ missing == missing }}{{ missing == none }}{{ missing != 1 }}{{ none == false }}{{ '1' == 1 }}{{ [1] == (1,) }}{{ {} == {} }}
{{ 'a' in 'abc' }}{{ 'x' not in 'abc' }}{{ 1 in [1, 2] }}{{ 'b' in d }}{{ 2 in (1, 2) }}{{ 5 in range(3) }}{{ 1 in missing }}{{ '' in '' }}
{{ 1 in 'abc' }}
{{ 1 in 5 }}
{{ 1 in none }}
{{ [] in {} }}
{{ 1 and 2 }}{{ 0 and 2 }}{{ 0 or 'x' }}{{ none or false }}{{ missing or 3 }}{{ not missing }}
{{ 'yes' if n else 'no' }}{{ 'yes' if none else 'no' }}{{ 'yes' if none }}{{ ('yes' if none) is defined }}{{ 1 if 0 else 2 if 0 else 3 }}
{{ messages[1:]|length }}{{ messages[::-1][0].role }}{{ s[1:4] }}{{ s[::-1] }}{{ s[::2] }}{{ s[-3:] }}{{ s[:-1] }}{{ s[10:] }}{{ s[2:1] }}{{ greek[1:5] }}{{ greek[::-2] }}{{ range(10)[2:8:3] }}{{ (1, 2, 3)[1:] }}
{{ s[::0] }}
{{ d[1:] }}
{{ n[1:] }}
{{ nil[1:] }}
{{ missing[1:] }}
{{ s['a':] }}
{{ s[1] }}{{ s[-1] }}{{ s[99] }}{{ s[99] is defined }}{{ greek[3] }}{{ empty[0] }}{{ messages[0][0] }}{{ (1, 2)[1] }}{{ range(5)[-1] }}{{ d[1] }}{{ d['zz'] }}{{ n[0] }}
{{ [1, 2].0 }}{{ messages.0.role }}
{{ missing.x }}
{{ missing['x'] }}
{{ missing() }}
{{ none.x }}{{ none.x is defined }}{{ n.x }}
{{ none.x.y }}
{{ n() }}
{{ d['items'] }}{{ d.b }}{{ d.get('b') }}{{ d.get('z') }}{{ d.get('z', 5) }}{{ d.keys()|list }}{{ d.values()|list }}{{ d.items()|list }}{{ d.keys() }}{{ d.items()|length }}
{{ d.pop('b') }}
{{ d.pop }}{{ d.update is defined }}{{ empty.append }}
{{ empty.append(1) }}
{{ s.__class__ }}{{ s.__class__ is defined }}
{{ s.__class__.__mro__ }}
{{ [1, 'a', none, true, 2.0, missing] }}{{ (1,) }}{{ () }}{{ {'a': [1], 2: 'x', none: ()} }}{{ ['it\'s', "q\"", 'both\'"', 'n\n\t\\', '\x00\x7f\xa0\u200b\U0001f600'] }}
{{ 1.0 }} {{ 1e16 }} {{ 123456789012345680.0 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1.5e-7 }} {{ 1e100 }} {{ 0.1 + 0.2 }} {{ 100.0 }} {{ -0.0 }} {{ 1e22 }} {{ 3.14 }} {{ 2.5e-310 }}
{{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 1_0.5_0 }} {{ 1e3 }} {{ 00 }}
{{ true }}{{ True }}{{ false }}{{ none }}{{ None }}
{{ 'a' 'b' "c" }}{{ '\x41\u00e9\n\101\'\"\\' }}{{ 'é\é' }}{{ '\q' }}
{{ '\x4' }}
{{ 'a' | upper | lower | title }}{{ 'hello wORLD-foo(bar' | title }}{{ 'hELLO' | capitalize }}{{ greek | upper }}{{ greek | lower }}{{ greek | title }}{{ greek | capitalize }}
{{ '  a b ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ none | trim }}|{{ 5 | trim }}|{{ missing | trim }}|
{{ [1, 2] | length }}{{ s | length }}{{ d | count }}{{ missing | length }}{{ range(4) | length }}{{ greek | length }}
{{ 5 | length }}
{{ none | length }}
{{ names | map('upper') | length }}
{{ s.split(',') }}{{ s.split(',', 1) }}{{ words.split() }}{{ words.split(none, 1) }}{{ s.rsplit(',', 1) }}{{ words.rsplit() }}{{ words.rsplit(none, 1) }}{{ s.split(sep=',', maxsplit=2) }}{{ ''.split() }}{{ ''.split(',') }}{{ ' a '.split(' ') }}
{{ s.split('') }}
{{ s.split(1) }}
{{ ' ab '.strip() }}|{{ ' ab '.lstrip() }}|{{ ' ab '.rstrip() }}|{{ 'abcab'.strip('ab') }}|{{ 'abc'.lstrip('ba') }}|{{ 'abc'.rstrip('cx') }}|{{ '\u3000\u00a0x\u2003'.strip() }}|
{{ s.startswith('a') }}{{ s.endswith(('x', 'c')) }}{{ s.startswith('b', 2) }}{{ s.startswith('', 99) }}{{ s.endswith('a', 0, 1) }}
{{ s.startswith(1) }}
{{ s.find('b') }}{{ s.find('z') }}{{ s.rfind(',') }}{{ s.index('c') }}{{ greek.find('\u03a3\u0391') }}{{ s.count(',') }}{{ 'aaa'.count('aa') }}{{ ''.count('') }}{{ s.count('') }}{{ s.find(',', 2, 4) }}
{{ s.index('z') }}
{{ s.replace(',', ';') }}{{ s.replace(',', ';', 1) }}{{ 'ab'.replace('', '-') }}{{ s.upper() }}{{ 'aBc'.swapcase() }}{{ 'hello world'.title() }}{{ 'HELLO'.capitalize() }}{{ '\u00df'.casefold() }}
{{ ','.join(['a', 'b']) }}{{ ''.join(names) }}{{ '-'.join('abc') }}{{ ','.join(d) }}
{{ ','.join([1]) }}
{{ 'a'.center(5) }}|{{ 'ab'.center(5, '*') }}|{{ 'ab'.ljust(4, '.') }}|{{ 'ab'.rjust(4) }}|{{ '-5'.zfill(4) }}|{{ '5'.zfill(3) }}|{{ 'a\tb'.expandtabs(4) }}|
{{ 'abc'.isalpha() }}{{ 'a1'.isalnum() }}{{ '12'.isdigit() }}{{ '\u00b2'.isdigit() }}{{ '\u00b2'.isdecimal() }}{{ '\u00bd'.isnumeric() }}{{ ' '.isspace() }}{{ 'A'.isupper() }}{{ 'a'.islower() }}{{ 'Ab Cd'.istitle() }}{{ ''.isalpha() }}{{ 'x y'.isidentifier() }}{{ '\n'.isprintable() }}{{ 'é'.isascii() }}
{{ 'a-b-c'.partition('-') }}{{ 'a-b-c'.rpartition('-') }}{{ 'abc'.partition('x') }}{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ 'a\nb\r\nc\u2028d'.splitlines() }}{{ 'a\nb\n'.splitlines(true) }}
{{ 'abc'.nothing() }}
{{ '%s is %d and %.2f %5s|%-5s|%05d %x %%' % ('a', 3, 2.5, 'r', 'l', 42, 255) }}{{ '%(k)s' % {'k': 1} }}{{ '%s' % 5 }}{{ '%r' % 'a' }}{{ '%+d % d' % (1, 2) }}{{ '%c%c' % (65, 'b') }}{{ '%e %g' % (12345.678, 0.0001) }}
{{ '%s' % (1, 2) }}
{{ '%s %s' % 1 }}
{{ '%d' % 'a' }}
{{ '%q' % 1 }}
{{ '{} {}'.format(1, 'a') }}{{ '{1}{0}'.format('a', 'b') }}{{ '{x}'.format(x=5) }}{{ '{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd') }}{{ '{:05.1f} {:,} {:x} {:#x} {:+d} {:%} {:e}'.format(2.55, 1234567, 255, 255, 5, 0.25, 12345.0) }}{{ '{!r}'.format('a') }}{{ '{{}}'.format() }}{{ '{0[a]} {0.b}'.format({'a': 1, 'b': 2}) }}{{ '{:{w}}'.format('a', w=4) }}|
{{ '{}'.format() }}
{{ '{x}'.format() }}
{{ '{} {0}'.format(1) }}
{{ '{:d}'.format('a') }}
{{ '{'.format() }}
{{ '%s-%s' | format(1, 2) }}{{ '%(a)s' | format(a=3) }}
{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}|{{ [1, 2.0, none, true, 'é\u2028"\\\n\x01'] | tojson }}|{{ 'é\U0001f600\x7f' | tojson(ensure_ascii=true) }}|{{ d | tojson(sort_keys=true) }}|{{ d | tojson(separators=(',', ':')) }}|{{ {} | tojson(indent=1) }}{{ [] | tojson(indent=1) }}{{ [[], {}] | tojson(indent='--') }}|{{ (1, 2) | tojson }}{{ {1: 2, none: 3, 1.5: 4, true: 5} | tojson }}
{{ missing | tojson }}
{{ {(1, 2): 3} | tojson }}
{{ range(3) | tojson }}
{{ {1: 2, 'a': 3} | tojson(sort_keys=true) }}
{{ names | map('upper') | tojson }}
{{ names | join(',') }}{{ [1, none, 2.0] | join }}{{ people | join('-', attribute='name') }}{{ missing | join(',') }}{{ 'abc' | join('.') }}
{{ 5 | join }}
{{ missing | default('d') }}{{ none | default('d') }}{{ none | default('d', true) }}{{ '' | default('d', boolean=true) }}{{ missing | d }}{{ missing.x | default('y') if false else 'n' }}
{{ names | first }}{{ names | last }}{{ [] | first }}{{ [] | last is defined }}{{ 'abc' | first }}{{ 'abc' | last }}{{ d | first }}{{ d | last }}{{ missing | first }}{{ missing | last }}
{{ names | map('upper') | first }}{{ names | map('upper') | list }}{{ people | map(attribute='name') | list }}{{ people | map(attribute='age', default=0) | list }}{{ people | map(attribute='age') | list }}{{ nested | map(attribute=0) | list }}{{ nested | map(attribute='1.0') | list }}
{{ names | map('upper') | last }}
{{ names | map('nothing') | list }}
{{ names | map('nothing') is defined }}
{{ (names | map | list) if false }}
{{ names | map | list }}
{{ 5 | map('upper') | list }}
{{ none | map('upper') | list }}
{{ [1, 0, none, 'a'] | select | list }}{{ [1, 2, 3] | select('odd') | list }}{{ [1, 2, 3] | reject('odd') | list }}{{ [1, 2, 3] | select('gt', 1) | list }}{{ people | selectattr('age') | map(attribute='name') | list }}{{ people | selectattr('age', 'gt', 3) | list }}{{ people | rejectattr('age', 'defined') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | selectattr('role', 'equalto', 'nobody')) is true }}{{ 'yes' if messages | selectattr('role', 'equalto', 'nobody') else 'no' }}
{% set it = names | map('upper') %}{{ it | list }}{{ it | list }}
{{ names | sort }}{{ names | sort(reverse=true) }}{{ names | sort(case_sensitive=true) }}{{ people | sort(attribute='name') | map(attribute='name') | list }}{{ 'bca' | sort }}{{ [3, 1, 2] | sort }}
{{ [1, 'a'] | sort }}
{{ people | sort(attribute='age') }}
{{ d | dictsort }}{{ d | dictsort(true) }}{{ {'x': 2, 'y': 1} | dictsort(by='value') }}{{ d | dictsort(reverse=true) }}
{{ names | dictsort }}
{{ missing | dictsort }}
{{ names | unique | list }}{{ [1, 1.0, true, 2] | unique | list }}{{ names | unique(true) | list }}
{{ [3, 1] | min }}{{ [3, 1] | max }}{{ names | min }}{{ [] | max is defined }}{{ [1, 2, 3] | sum }}{{ people | sum(attribute='age', start=1) if false else 'n' }}{{ [[1], [2]] | sum(start=[]) }}{{ [1.5, 2] | sum }}
{{ ['a'] | sum }}
{{ [1, 2, 3, 4, 5] | batch(2) | list }}{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3, 4, 5] | slice(2) | list }}{{ [1, 2, 3] | slice(2, 'x') | list }}
{{ people | groupby('age', default=0) | list }}{% for g in people | groupby('name') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}{% for k, v in names | groupby(0) %}{{ k }}{{ v }}{% endfor %}
{{ [1, 2] | reverse | list }}{{ 'abc' | reverse }}{{ names | map('upper') | reverse }}{{ d | reverse | list }}
{{ 5 | reverse }}
{{ 'a b' | replace(' ', '_') }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 5 | replace(5, 6) }}
{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent('> ', blank=true) }}|{{ '' | indent }}|{{ 'a\n' | indent }}|
{{ none | indent }}
{{ '42' | int }}{{ '4.7' | int }}{{ 'x' | int }}{{ 'x' | int(5) }}{{ 4.9 | int }}{{ -4.9 | int }}{{ '0x1f' | int(0, 16) }}{{ '  7 ' | int }}{{ '1_000' | int }}{{ none | int }}{{ true | int }}{{ '\u0663' | int }}{{ '1e3' | int }}{{ 'inf' | int }}{{ '' | int }}
{{ missing | int }}
{{ '4.5' | float }}{{ 'x' | float }}{{ 3 | float }}{{ 'nan' | float }}{{ '-Infinity' | float }}{{ '1_0.5' | float }}{{ none | float(1.5) }}
{{ 2.5 | round }}{{ 3.5 | round }}{{ 2.675 | round(2) }}{{ 1234.5 | round(-2) }}{{ 2.1 | round(method='ceil') }}{{ 2.19 | round(1, 'floor') }}{{ 5 | round }}{{ -2.5 | round }}{{ 15 | round(-1) }}
{{ -5 | abs }}{{ -2.5 | abs }}{{ (-5) | abs }}{{ true | abs }}
{{ 'a' | abs }}
{{ 5 | string }}{{ none | string }}{{ 1.0 | string | length }}{{ [1] | string }}{{ missing | string }}|
{{ '<a>' | escape }}{{ '<a>' | e | e }}{{ '<a>' | safe }}{{ ('<a>' | safe) + '<b>' }}{{ '<b>' + ('<a>' | safe) }}{{ '<a>' | forceescape }}{{ ['<a>' | safe] }}{{ ('<a>' | safe) ~ '<b>' }}{{ ('<a>' | safe) is escaped }}{{ ('<a>' | safe | upper) + '<' }}{{ ('x' | safe) == 'x' }}
{{ [1, 2] | truncate(5) }}{{ missing | truncate }}{{ missing.__class__ }}{{ 'hello world' | truncate(8) }}{{ 'hello world foo' | truncate(9) }}{{ 'hello world foo' | truncate(9, true) }}{{ 'hello world' | truncate(5, end='!', leeway=0) }}{{ 'hi' | truncate(5) }}{{ 'ab cd' | center(11) }}|{{ 'one two-three _x' | wordcount }}
{{ 'a b/c?&\u00e9' | urlencode }}{{ {'a b': 'c&', 'd': 1} | urlencode }}{{ 1 | filesizeformat }}{{ 999 | filesizeformat }}{{ 12345 | filesizeformat }}{{ 12345 | filesizeformat(true) }}{{ {'a': '<', 'b': none} | xmlattr }}
{{ d | attr('b') }}{{ d | attr('keys') is defined }}{{ s | attr('upper') is defined }}
{{ n | nothing }}
{% if false %}{{ n | nothing }}{% endif %}ok
{% if true %}{{ n | nothing }}{% endif %}
{% if false %}{% for i in [1] %}{{ n | nothing }}{% endfor %}{% endif %}
{{ n is nothing }}
{{ (n | nothing) if false else 'ok' }}
{{ 'a' is string }}{{ 1 is string }}{{ 1 is number }}{{ 1.5 is number }}{{ true is number }}{{ 1 is integer }}{{ true is integer }}{{ 1.0 is float }}{{ true is boolean }}{{ none is none }}{{ missing is none }}{{ d is mapping }}{{ [] is mapping }}
{{ [] is iterable }}{{ 'a' is iterable }}{{ 5 is iterable }}{{ missing is iterable }}{{ none is iterable }}{{ [] is sequence }}{{ 'a' is sequence }}{{ d is sequence }}{{ 5 is sequence }}{{ missing is sequence }}{{ d.keys() is sequence }}{{ range(2) is sequence }}{{ (names | map('upper')) is sequence }}{{ (names | map('upper')) is iterable }}
{{ 1 is odd }}{{ 2 is even }}{{ 6 is divisibleby 3 }}{{ 6 is divisibleby(4) }}{{ 1 is eq 1 }}{{ 1 is ne(2) }}{{ 1 is lt 2 }}{{ 2 is ge 2 }}{{ 'a' is in 'abc' }}{{ 1 is not in [2] }}{{ 'a' is lower }}{{ 'A' is upper }}{{ true is true }}{{ 1 is true }}{{ false is false }}{{ missing is undefined }}{{ missing is not defined }}{{ none is sameas none }}{{ range is callable }}{{ 5 is callable }}{{ 'upper' is filter }}{{ 'odd' is test }}{{ 'zz' is filter }}
{{ 'a' is odd }}
{{ missing is odd }}
{{ 1 is string or 'b' }}{{ not 1 is string }}{{ 1 is not string and 2 }}{{ n is defined and n > 3 }}{{ n > 3 is true }}
{{ range(3) | list }}{{ range(1, 4) | list }}{{ range(5, 0, -2) | list }}{{ range(0) | list }}{{ range(3) }}{{ range(1, 5, 2) }}
{{ range(1000000000) }}
{{ range(100001) }}
{{ range(100000) | length }}
{{ range(1, 2, 0) }}
{{ range('a') }}
{{ range(missing) }}
{{ dict(a=1, b=2) }}{{ dict([('x', 1)], y=2) }}{{ dict({'q': 1}) }}{{ {'a': 1, 'a': 2} }}{{ {1: 'a', true: 'b'} }}
{{ {[]: 1} }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.current }}
{% set j = joiner('|') %}{{ j() }}a{{ j() }}b{{ j() }}c
{{ raise_exception('no system: ' ~ messages[0].role) }}
{{ raise_exception(5) }}
{{ raise_exception() }}
{% for m in messages %}{% if loop.index0 == 2 %}{{ raise_exception('r\u00f4le') }}{% endif %}{% endfor %}
{{ strftime_now('%Y-%m-%d %H:%M:%S %d %B %y %a %A %b %j %% %f %z|') }}{{ strftime_now('') }}
{{ strftime_now(5) }}
{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content if m.content is string }}{% endgeneration %};{% endfor %}
é{% generation %}ü{% set n = 1 %}{{ n }}{% endgeneration %}{{ n }}
{% generation %}{% endgeneration %}{%- generation -%} x {%- endgeneration -%}
{% generation x %}{% endgeneration %}
{{ "{{ x }}" }}{{ '%}' }}{{ {'a': {'b': 1}} }}{{ {'a': {'b': {}}}}}
{{ [1, 2,] }}{{ {'a': 1,} }}{{ (1, 2,) }}{{ (1) }}{{ [(), []] }}
{{ loop }}{{ loop.index }}
{{ messages | length > 2 }}{{ (messages | length) * 2 }}{{ 'a' ~ 1 + 2 }}{{ 1 + 2 ~ 'a' }}
{{ 'a' if true else 'b' if true else 'c' }}{{ [i for i in x] }}
{{ 9223372036854775807 }}{{ -9223372036854775807 }}
{{ messages[0].content.title() }}{{ messages[0].content.upper().lower().split()[0] }}{{ (n | string).zfill(3) }}
{{ foo.bar is defined }}
{{ foo is defined and foo.bar is defined }}{{ messages[9] is defined }}{{ messages[0].nothing is defined }}
{{ messages[9].role }}
{{ caller }}{{ varargs }}
{% set x = 5 %}{% set f = x | string %}{% set a = [x] %}{{ f ~ a }}{% set x = x + 1 %}{{ x }}{{ a }}
{{ 5.0 | int ~ 1 }}{{ 10 / 4 | int }}{{ 2 + 3 * 4 - 6 / 2 }}{{ (2 + 3) * 4 }}{{ 7 - 2 - 1 }}{{ 2 * 3 % 4 }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor -%}  end
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ system_message }}{{ loop_messages | length }}
{{ names[1:] | map('lower') | join('+') | upper }}{{ names | select('in', ['a', 'b']) | list }}{{ names | map('replace', 'a', 'z') | list }}{{ [' a '] | map('trim') | first }}
""".strip("\n").split("\n")

# With line breaks.
BLOCKS = [
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "a\n  {%- if true -%}\n  b\n  {%- endif +%}\nc\n\n",
    "a\n  {%+ if true %}\n  b\n  {%+ endif %}\n c",
    "  {# x #}\n  {# y -#}\n z {# w #}\n",
    "{% for i in range(2) %}\n    {{ i }}\n{% endfor %}\n",
    "  {{ n }}\n  {{- n }}\n{{ n -}}  \n x\r\ny\rz\n",
    "{% raw %}\n {% a %} \n{% endraw %}\n b",
    "x {% raw -%} \n y {%- endraw %}\n z",
    "   {% set a = 1 %}   {% set b = 2 %}\n{{ a }}{{ b }}",
    "{% macro m() %}\n  line\n{% endmacro %}\n[{{ m() }}]",
    "{{ 'a\nb' }}{{ '\\\n' }}",
    "{{ 1\n+\n2 }}{# multi\nline #}\n{{ 3 }}",
    "\n\n{% if true %}{% endif %}\n\n",
    "{% set t %}\n  x\n{% endset %}\n{{ t }}|",
    "{%\n if true\n%}\nyes{%\nendif\n%}",
    "{% filter upper %}\n a\n{% endfilter %}\n",
    "{{ '''a''' }}", "{", "{{", "{%", "{#", "{#a", "{% raw %}", "{% raw %}a", "}}", "a { b } c", "{{}}", "{% %}", "{{ x }", "{{ x %}",
    "\ufeffa", "", "\n", "{{ x }}\n", "\u00a0{% if true %}\u00a0b{%- endif %}",
]


def main():
    cases = []
    for source in TEMPLATES + BLOCKS:
        result = huggingface_jinja.render(source, CHAT)
        case = {"template": source}
        if "error" in result:
            case["raised"] = result["raised"]
        else:
            case.update(result)
        cases.append(case)
    print(json.dumps({"variables": CHAT, "cases": cases}, ensure_ascii=True, indent=0))


if __name__ == "__main__":
    main()
