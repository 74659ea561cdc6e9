"""Hostile chat templates, for every place that renders one: all must fail, soon, at no cost to the caller.

WALKS try to get from a template to Python, and RUNS from there to the machine: one that succeeded would leave the file
CANARY behind, a name to be replaced by a path. BIG ask for more memory, text or depth than there is. SLOW would run for
minutes.
"""

from __future__ import annotations

from attar.text.template import MAX_TEMPLATE

WALKS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ ''['__cl' ~ 'ass__'] }}",
    "{{ ''['%c%cclass%c%c'|format(95, 95, 95, 95)] }}",
    "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ lipsum(n=5) }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ cycler('a').next() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ joiner(',')() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.__class__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ range.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}",
    "{% for x in [1] %}{{ loop._iterator.gi_frame }}{{ loop.__class__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
    "{{ ('{0.__class' ~ '__}').format(1) }}",
    "{{ ''.format.__self__.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'os' import system %}",
    "{% extends 'base' %}",
    "{{ 'a'.encode().decode('zlib') }}",
    "{{ eval('1') }}",
    "{{ __import__('os') }}",
]
RUNS = [
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ lipsum.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ namespace.__init__.__globals__['__builtins__'].exec('open(\\'CANARY\\', \\'w\\')') }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ raise_exception.__globals__['sys'].modules['os'].system('touch CANARY') }}",
    "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'Popen' %}"
    "{{ c(['touch', 'CANARY']) }}{% endif %}{% endfor %}",
    "{{ ''['%c%cclass%c%c'|format(95,95,95,95)].mro()[1]['%c%csubclasses%c%c'|format(95,95,95,95)]() "
    "| selectattr('__name__', 'eq', 'Popen') | map('attr', '__init__') | list }}{{ 1 / 0 }}",
    "{% set f = messages.__class__.__base__ %}{{ f.__subclasses__()[0].__init__.__globals__['os'].mknod('CANARY') }}",
]
BIG = [
    "{{ range(10**9) | list }}",
    "{{ 'A' * 10**9 }}",
    "{{ ['A'] * 10**9 }}",
    "{{ 'A'.ljust(10**9) }}",
    "{{ 'A'.center(10**9) }}",
    "{{ 'A'.zfill(10**9) }}",
    "{{ 'A' | center(10**9) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ 'a,' | indent(10**9, true) }}",
    "{% set ns = namespace(s='AAAAAAAA') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% for i in range(9999) %}{{ 'A' * 1000 }}{% endfor %}",
    "{{ 'é' * (3 * 2**20) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{{ " + "-" * 30_000 + "1 }}",
    "{{ [" * 3000,
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ x" + ".y" * 3000 + " }}",
    "{{ undefined.chain.of.names }}",
    "{{ raise_exception('no ' * 10**6) }}",
    "{% for i in range(9) %}{{ raise_exception(i) }}{% endfor %}",
    "{{ '\\ud800' }}",
    "A" * (MAX_TEMPLATE + 1),
    "é" * (MAX_TEMPLATE // 2 + 1),
    "{{ 2**(2**30) }}",
]
SLOW = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ (10**10000000) | string }}",
    "{{ (7**9000000) * (7**9000000) // 3 }}",
    "{% for a in range(99999) %}{% set b = range(99999) | list %}{% endfor %}",
    "{{ range(99999) | map('string') | join(',') | list | sort | unique | list | length }}" * 200,
]
