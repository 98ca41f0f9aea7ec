"""Golds as data sets of mathematics have them: right completions score 1, wrong ones 0."""

import pytest

from actors.rewards import math_answers
from actors.rewards.libraries import math_verify
from actors.rewards.math_answers import read

GOLDS = r"""
5 => 5 ;; 5.0 ;; \frac{10}{2} => 6 ;; -5 ;; 5x
-3 => -3 ;; - 3 ;; −3 => 3 ;; -2 ;; 0
007 => 7 ;; 007 => 70 ;; 8 ;; 0
2021 => 2021 ;; 2{,}021 => 2022 ;; 20 ;; 21
1,000 => 1000 ;; 1{,}000 ;; 1\,000 ;; 1,000 => 1 ;; 0 ;; 10000
1{,}000 => 1000 ;; 1,000 ;; 1 000 => 1 ;; 0 ;; 100
11\,111 => 11111 ;; 11,111 ;; 11{,}111 => 11 ;; 111 ;; 122
12,345,678 => 12345678 ;; 12{,}345{,}678 => 12 ;; 345 ;; 678
1\!000 => 1000 => 1 ;; 0 ;; 100
1 000 000 => 1000000 ;; 10^6 ;; 1,000,000 => 1 ;; 1000 ;; 0
.5 => 0.5 ;; \frac12 ;; 1/2 => 5 ;; 0.05 ;; 50
-.75 => -\frac34 ;; -0.75 => 0.75 ;; -75 ;; -7.5
3.14 => 3.14 ;; \frac{157}{50} => \pi ;; 3.1 ;; 314
2.0 => 2 ;; 2.00 => 20 ;; 0.2 ;; -2
0.\overline{3} => \frac13 ;; 0.\overline{3} ;; 0.333333 => 0.3 ;; 0 ;; 3
0.1\overline{6} => \frac16 ;; \frac{1}{6} => 0.16 ;; 0.1 ;; 6
\frac12 => \frac{1}{2} ;; 0.5 ;; 1/2 ;; \dfrac12 => 12 ;; 2 ;; 1
\dfrac{3}{4} => 0.75 ;; \frac34 ;; 3/4 ;; \frac68 => \frac43 ;; 34 ;; 3
\tfrac{14}{3} => \frac{14}{3} ;; 14/3 ;; 4\frac23 => 3 ;; 14 ;; \frac{3}{14}
-\frac{1}{2} => -0.5 ;; \frac{-1}{2} ;; -1/2 => \frac12 ;; -2 ;; 1
3/4 => \frac34 ;; .75 => \frac43 ;; 3 ;; 4
\frac{\frac12}{3} => \frac16 ;; 1/6 => \frac32 ;; \frac12 ;; 3
3\frac{1}{2} => \frac72 ;; 3.5 ;; 3\tfrac12 => \frac32 ;; 3 ;; 1.5
3 1/2 => 3.5 ;; 7/2 ;; 3\frac12 => 3 ;; \frac{31}{2} ;; 1.5
2 2/3 => \frac83 ;; 8/3 ;; 2\frac{2}{3} => 2 ;; \frac43 ;; \frac{22}{3}
-2\frac13 => -\frac73 ;; -7/3 => -\frac53 ;; \frac73 ;; -2
2½ => 2.5 ;; \frac52 => 1 ;; 2 ;; \frac12
7.2\% => 7.2\% ;; 7.2% ;; 0.072 => 7.2 ;; 72\% ;; 0.72
50\% => 50\% ;; 50 \% ;; 0.5 ;; \frac12 ;; 50\text{ percent} => 5\% ;; 500 ;; 2
12.5% => 12.5\% ;; \frac18 => 12.5 ;; 12\% ;; 125
90^\circ => 90 ;; 90^\circ ;; 90° ;; 90^{\circ} ;; 90 \text{ degrees} => 9 ;; 180 ;; 0
45^{\circ} => 45 ;; 45 degrees => 54 ;; 135^\circ ;; 4
30 degrees => 30^\circ ;; 30 => 60 ;; 3 ;; 0
5\text{ cm} => 5 ;; 5\text{ cm} ;; 5 cm ;; 5\,\mathrm{cm} => 5\text{ m} ;; 50 ;; 6\text{ cm}
12\text{ ways} => 12 ;; 12\text{ ways} => 11 ;; 1 ;; 2
24\text{ cm}^2 => 24 ;; 24\text{ cm}^2 ;; 24\,\text{cm}^{2} => 24\text{ m}^2 ;; 4 ;; 25
6\sqrt{2}\text{ units} => 6\sqrt{2} ;; \sqrt{72} => 6 ;; \sqrt2 ;; 12
5 hours => 5 ;; 5\text{ hours} => 6 ;; 50 ;; 0
60 km/h => 60 ;; 60\text{ km/h} => 6 ;; 61 ;; 0
10 \mathrm{~cm} => 10 ;; 10 \text{ cm} => 1 ;; 100 ;; 10 \text{ m}
5\text{m} => 5 ;; 5\text{ m} ;; 5\,\mathrm{m} => 5\text{ cm} ;; 6 ;; 50
20^\circ\text{C} => 20 ;; 20^\circ C ;; 20°C => 2 ;; 20C ;; 21
1 day => 1 ;; 1\text{ day} => 2 ;; 0 ;; 10
7 PM => 7\text{ p.m.} ;; 7 pm => 7\text{ a.m.} ;; 8 ;; 70
\text{12 pounds} => 12 ;; 12 pounds => 1 ;; 2 ;; 21
\$5 => 5 ;; \$5 ;; \$5.00 ;; 5\text{ dollars} => 50 ;; 0.5 ;; 6
\$32{,}000 => 32000 ;; \$32,000 => 32 ;; 0 ;; 3200
18.90\text{ dollars} => 18.9 ;; \$18.90 => 18 ;; 90 ;; 19
€20 => 20 => 2 ;; 0 ;; 200
4^{\text{th}} => 4 ;; 4\text{th} ;; 4th => 5 ;; 40 ;; 16
21st => 21 ;; 21^{\text{st}} => 12 ;; 2 ;; 1
\text{9} => 9 => 8 ;; 90 ;; 99
6.02 \times 10^{23} => 6.02\times10^{23} ;; 602\cdot 10^{21} ;; 6.02e23 => 6.02 ;; 23 ;; 6.03 \times 10^{23}
1.5e-7 => 1.5\times10^{-7} ;; 0.00000015 => 0 ;; 1.5 ;; 1.5\times10^{-8}
10^{-20} => \frac{1}{10^{20}} ;; 10^{-20} => 0 ;; 10 ;; 10^{-21}
2^{10} => 1024 ;; 2^{10} ;; 2^10 => 2 ;; 10 ;; 20
10^5 => 100000 ;; 10^5 => 10 ;; 5 ;; 50
2^{2021}-1 => 2^{2021}-1 ;; -1+2\cdot2^{2020} => 2^{2021} ;; 2^{2020}-1 ;; 2021
2^10 => 1024 => 20 ;; 2^1 ;; 0
\frac\pi2 => \frac\pi{2} ;; \frac{\pi}2 ;; 0.5π => \pi ;; 2 ;; \frac2\pi
\frac\sqrt{2}2 => \frac{\sqrt{2}}2 ;; 2**-0.5 => \sqrt2 ;; 2 ;; 1
e^\frac{\pi}{2} => e^{\pi/2} ;; e^\frac\pi2 => e^\pi ;; e ;; \frac{\pi}{2}
2**10 => 1024 ;; 2¹⁰ => 20 ;; 2 ;; 210
x^-1 => \frac1x ;; x**-1 ;; x⁻¹ => x ;; -x ;; 1
\sqrt{2} => \sqrt2 ;; 2^{1/2} ;; √2 ;; sqrt(2) => 2 ;; 1.41 ;; \sqrt3
2\sqrt{3} => \sqrt{12} ;; 2\sqrt3 ;; 2*sqrt(3) => 2 ;; 3 ;; 6
\frac{\sqrt{3}}{2} => \frac{3}{2\sqrt3} ;; \sqrt{\frac34} => \frac32 ;; 3 ;; \sqrt3
\frac{1}{\sqrt{2}} => \frac{\sqrt2}{2} ;; \sqrt{1/2} => \frac12 ;; 2 ;; \sqrt2
10\sqrt{2} + 5 => 5+10\sqrt2 ;; 5(1+2\sqrt2) => 10 ;; 5 ;; 15\sqrt2
5-\sqrt{2} => -\sqrt2+5 => 5 ;; 2 ;; 5+\sqrt2
\sqrt[3]{2} => 2^{1/3} ;; \sqrt[3]{2} => \sqrt2 ;; 3 ;; 2
\sqrt{5+2\sqrt6} => \sqrt2+\sqrt3 => \sqrt5 ;; 5 ;; \sqrt2
\frac{1+\sqrt5}{2} => \frac12+\frac{\sqrt5}2 ;; \frac{2}{\sqrt5-1} => \frac{1-\sqrt5}{2} ;; 1 ;; 5
5\pi => 5\pi ;; 5 \pi ;; 5π ;; 5*pi => 5 ;; \pi ;; 15.7
\frac{3\pi}{4} => \frac34\pi ;; 3\pi/4 ;; 0.75\pi => 3 ;; 4 ;; \frac{4\pi}{3}
\pi => \pi ;; 3.1415927 => 3 ;; 3.14 ;; \frac{22}{7}
36\pi - 12 => 12(3\pi-1) => 36 ;; 24\pi ;; -12
e => e ;; e^1 => 1 ;; 2.7 ;; \pi
e^2 => e^{2} ;; \exp(2) => 2e ;; 2 ;; e
\frac{e-1}{e} => 1-\frac1e ;; 1-e^{-1} => e ;; \frac1e ;; 1
i => i => 1 ;; -i ;; 0
2i => 2i ;; 2\cdot i => 2 ;; -2i ;; i
1+2i => 1+2i ;; 2i+1 => 1 ;; 2 ;; 1-2i
3-2\sqrt{2}i => 3-2i\sqrt2 => 3 ;; 3+2\sqrt2i ;; 2
\frac{1+i}{2} => \frac{1}{1-i} ;; \frac12+\frac12i => \frac12 ;; \frac{1-i}{2} ;; 1+i
a+bi => a+bi ;; a+ib => a ;; a-bi ;; b
1, 2 => 1,2 ;; 2,1 ;; \{1,2\} ;; 1 \text{ and } 2 ;; x=1,x=2 => 1 ;; 2 ;; 1,3
1,2,3 => 3,2,1 ;; 1, 2, 3 => 1 ;; 3 ;; 1,2
1 \text{ and } 2 => 1,2 ;; 1 and 2 => 1 ;; 2 ;; 12
12 \text{ or } 15 => 12,15 ;; 15 or 12 => 12 ;; 15 ;; 12,16
-1, 0, \frac12 => \frac12,0,-1 ;; -1, 0, 0.5 => -1 ;; 0 ;; -1,0
2, \sqrt{3}, \pi => \pi, 2, \sqrt3 => 2 ;; \pi ;; 2,3,\pi
100, 200 => 200, 100 ;; 100 and 200 => 100 ;; 200 ;; 300
x=1 \text{ or } x=2 => 1,2 ;; x=2 or x=1 => 1 ;; 2 ;; x=1
30^\circ, 60^\circ => 30,60 ;; 60°, 30° => 30 ;; 60 ;; 90
\{1,2,3\} => \{3,2,1\} ;; \left\{1,2,3\right\} ;; 1,2,3 => \{1,2\} ;; 1 ;; \{1,2,4\}
\{5\} => 5 ;; \{5\} => \{6\} ;; 6 ;; \{5,6\}
\emptyset => \varnothing ;; \{\} ;; ∅ => 0 ;; \{0\} ;; 1
(1, 2) => (1,2) ;; \left(1,2\right) ;; (1.0, 2) => (2,1) ;; 1 ;; [1,2]
(3, -1) => (3,-1) ;; \left( 3, -1 \right) ;; (x,y)=(3,-1) => (-1,3) ;; (4,0) ;; 3
\left( 3, \frac{\pi}{2} \right) => (3,\frac\pi2) ;; (3, \pi/2) => 3 ;; (3,\pi) ;; (\frac\pi2,3)
(1,2,3) => (1, 2, 3) => (1,3,2) ;; (1,2) ;; 1
(-1,2),(3,4) => (3,4),(-1,2) ;; (-1, 2) and (3, 4) => (-1,2) ;; (2,-1),(3,4) ;; (3,4)
(x,y) = (1,2) => (1,2) ;; x=1, y=2 => (2,1) ;; 1 ;; 2
x=1,y=2 => x=1, y=2 ;; y=2,x=1 ;; (1,2) => x=2,y=1 ;; 1 ;; x=1
[1,2) => [1,2) ;; \left[1,2\right) ;; 1 \le x < 2 => [1,2] ;; (1,2) ;; 1
[-2,7] => [-2,7] ;; -2\le x\le 7 ;; x\in[-2,7] => (-2,7) ;; [-2,8] ;; 7
(-\infty, 3] => (-\infty,3] ;; x \le 3 => (-\infty,3) ;; 3 ;; [3,\infty)
(2, \infty) => x>2 ;; (2,\infty) ;; (2, +\infty) => [2,\infty) ;; 2 ;; (3,\infty)
(-\infty,2)\cup(3,\infty) => (3,\infty)\cup(-\infty,2) ;; x<2 \text{ or } x>3 => (2,3) ;; 2 ;; (-\infty,2]\cup(3,\infty)
[-1,0) \cup (0,1] => (0,1]\cup[-1,0) => [-1,1] ;; [-1,0) ;; 0
\mathbb{R} => \mathbb{R} ;; (-\infty,\infty) => \mathbb{Z} ;; 0 ;; (0,\infty)
\mathbb{R}\setminus\{1\} => (-\infty,1)\cup(1,\infty) ;; \mathbb{R} \setminus \{1\} => 1 ;; \mathbb{R} ;; \mathbb{R}\setminus\{2\}
x \in (1, 2) => (1,2) ;; x\in(1,2) ;; 1<x<2 => 1 ;; 2 ;; [1,2]
x \in [0, 1] => [0,1] ;; 0 \leq x \leq 1 => (0,1) ;; 0 ;; 1
2 < x < 3 => 2<x<3 ;; (2,3) ;; 3>x>2 => 2 ;; 3 ;; 2\le x<3
x \ge 2 => x\geq2 ;; [2,\infty) ;; x \geqslant 2 ;; 2 \le x => 2 ;; x>2 ;; x\le2
x>2 => x>2 ;; 2<x ;; (2,\infty) => 2 ;; x<2 ;; x\ge2
x < -1 \text{ or } x > 1 => x>1 \text{ or } x<-1 ;; (-\infty,-1)\cup(1,\infty) => x>1 ;; 1 ;; (-1,1)
a \le 4 => a\leq 4 ;; (-\infty,4] => 4 ;; a<4 ;; a \ge 4
1<2x+1<3 => 1<2x+1<3 ;; 3>2x+1>1 => 1 ;; 3 ;; 1<2x<3
x \neq 3 => x\ne3 ;; x \neq 3 => 3 ;; x=3 ;; x \ne 4
x = 5 => 5 ;; x=5 ;; 5 = x => 6 ;; x=6 ;; y=5
y=2x+3 => y=2x+3 ;; y=3+2x ;; 2x+3 ;; 2x-y+3=0 => 3 ;; y=2x ;; y=x+3
x+y=1 => x+y=1 ;; y=1-x ;; 2x+2y=2 => 1 ;; x+y=2 ;; x-y=1
x^2+y^2=1 => x^2+y^2=1 ;; y^2+x^2-1=0 => x+y=1 ;; 1 ;; x^2+y^2=2
x^2+1=0 => x^2+1=0 ;; x^2=-1 => x^2+2=0 ;; 0 ;; x^4+3=0
\frac{x^2}{4}+\frac{y^2}{9}=1 => 9x^2+4y^2=36 ;; \frac{y^2}{9}+\frac{x^2}{4}=1 => 1 ;; x^2+y^2=1 ;; \frac{x^2}{9}+\frac{y^2}{4}=1
x = 2k\pi => 2k\pi ;; x=2\pi k => 2\pi ;; k\pi ;; 2
f(x) = x^2 + 1 => x^2+1 ;; f(x)=1+x^2 => 1 ;; x^2 ;; f(x)=x+1
a_n = 2n+1 => 2n+1 ;; a_n=2n+1 ;; a_{n}=1+2n => 1 ;; 2n ;; 3
2n+1 => 2n+1 ;; 1+2n => 1 ;; 2 ;; 2n-1
3x^2-2 => 3x^2-2 ;; -2+3x^2 => 3 ;; 2 ;; 3x^2
x^2 - 7x + 10 => (x-2)(x-5) ;; 10-7x+x^2 => 10 ;; x^2 ;; (x+2)(x+5)
(x+1)(x-2) => x^2-x-2 ;; (x-2)(x+1) => 2 ;; -2 ;; (x+1)(x+2)
p - q => p-q ;; -q+p => q-p ;; p ;; p+q
\frac{a}{b} => a/b ;; \frac ab => \frac ba ;; a ;; b
\frac{x+1}{x-1} => 1+\frac{2}{x-1} => 1 ;; -1 ;; \frac{x-1}{x+1}
n(n+1) => n^2+n ;; (n+1)n => n ;; n^2 ;; n^2-n
\frac{n(n+1)}{2} => \frac{n^2+n}{2} ;; n(n+1)\cdot\frac12 => n ;; 2 ;; n(n+1)
xy => yx ;; x \cdot y => x ;; y ;; x+y
x_1 + x_2 => x_2+x_1 ;; x_{1}+x_{2} => x ;; x_1 ;; 3
5x => 5x ;; 5 \cdot x => 5 ;; x ;; 5y
x^{n+1} => x^{n+1} ;; x\cdot x^n => x^n ;; x ;; n+1
5m => 5m ;; 5 \cdot m => 5 ;; m ;; 6m
\frac{1}{2}bc => \frac{bc}{2} ;; \frac12bc => \frac12 ;; bc ;; 2bc
|x| => |x| ;; \left|x\right| ;; \lvert x \rvert => x ;; -x ;; 1
\lfloor x \rfloor => \lfloor x\rfloor ;; \left\lfloor x \right\rfloor => x ;; \lceil x\rceil ;; 1
4! => 24 ;; 4! => 4 ;; 16 ;; 41
n! => n! => n ;; (n+1)! ;; 1
\binom{5}{2} => 10 ;; \binom52 ;; \dbinom{5}{3} => 5 ;; 2 ;; \frac52
\binom{n}{2} => \frac{n(n-1)}{2} ;; \binom{n}{2} => n ;; 2 ;; \frac n2
\log_2 8 => 3 ;; \log_{2}{8} => 8 ;; 2 ;; 4
\ln 2 => \ln 2 ;; \ln(2) => 2 ;; \ln 3 ;; 0.69
\log_{3}{5} => \frac{\ln 5}{\ln 3} ;; \log_3 5 => 5 ;; 3 ;; \log_5 3
\sin x => \sin x ;; \sin(x) => x ;; \cos x ;; \sin 2x
\sin^2 x => 1-\cos^2 x ;; (\sin x)^2 => \sin x ;; \cos^2 x ;; 2
\cos 2x => 1-2\sin^2 x ;; 2\cos^2x-1 => \cos x ;; \sin 2x ;; 2
\sin 30^\circ => \frac12 ;; 0.5 => 30 ;; \sin 30 ;; 1
\tan^{-1} 2 => \arctan 2 ;; \tan^{-1}(2) => 2 ;; \tan 2 ;; \frac12
\arcsin\frac13 => \arcsin\frac{1}{3} => \frac13 ;; 3 ;; \arccos\frac13
\pm 2021 => \pm 2021 ;; 2021, -2021 ;; ±2021 => 2021 ;; -2021 ;; \pm 2022
-2 \pm \sqrt{3} => -2\pm\sqrt3 ;; -2+\sqrt3, -2-\sqrt3 => -2 ;; -2+\sqrt3 ;; \pm\sqrt3
x = \pm 1 => \pm1 ;; 1,-1 ;; x=\pm1 => 1 ;; -1 ;; \pm2
1 \pm i => 1+i,1-i ;; 1\pm i => 1 ;; 1+i ;; i
\infty => \infty ;; +\infty => -\infty ;; 0 ;; 8
-\infty => -\infty => \infty ;; 0 ;; -1
3:4 => 3:4 ;; \frac34 ;; 6:8 => 4:3 ;; 3 ;; 4
1:12 => 1:12 ;; \frac{1}{12} => 1:13 ;; 12 ;; 12:1
1:30 => 1:30 ;; 01:30 => 1 ;; 30 ;; 1:31
10:30 \text{ a.m.} => 10:30 a.m. ;; 10:30\text{ am} => 10:30 p.m. ;; 10 ;; 30
1011_2 => 1011_2 ;; 1011_{2} => 1011 ;; 11 ;; 1010_2
52_8 => 52_8 ;; 52_{8} => 52 ;; 8 ;; 53_8
\begin{pmatrix} 1 \\ 2 \end{pmatrix} => \begin{pmatrix}1\\2\end{pmatrix} ;; \begin{bmatrix}1\\2\end{bmatrix} => 1 ;; 2 ;; \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} => \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ;; \begin{bmatrix}1&2\\3&4\end{bmatrix} => 1 ;; \begin{pmatrix}1&3\\2&4\end{pmatrix} ;; 4
\begin{bmatrix} -\frac12 & 0 \end{bmatrix} => \begin{bmatrix}-0.5&0\end{bmatrix} => 0 ;; \begin{bmatrix}\frac12&0\end{bmatrix} ;; -\frac12
C => C ;; (C) ;; \text{C} ;; \text{(C)} ;; \textbf{(C)} ;; C) 12 => A ;; B ;; D
(B) => B ;; \text{(B)} => A ;; C ;; 2
\text{(C)} => C ;; (C) ;; \text{C} ;; \textbf{(C)}\ 5 => (B) ;; A ;; 5
\textbf{(E)} => E ;; \text{E} ;; (E) => e^2 ;; A ;; 2.7
\mathrm{D} => D ;; (D) => C ;; 4 ;; A
\text{A}, \text{C} => A, C ;; \text{(C)}, \text{(A)} => A ;; C ;; B, C
\mathbf{v} => \mathbf{v} ;; v => 2v ;; u ;; 0
A, C => A,C ;; C, A ;; A and C => A ;; C ;; B, C
\text{yes} => yes ;; \text{Yes} ;; \textbf{yes} => no ;; \text{no} ;; 1
No => no ;; \text{No} => yes ;; on ;; 0
\text{Tuesday} => Tuesday ;; \text{Tuesday} => Monday ;; \text{Sunday} ;; 2
even => even ;; \text{even} => odd ;; 2 ;; \text{neither}
IV => IV ;; \text{IV} => VI ;; IX
SAS => \text{SAS} => SSA ;; ASA
\text{II} => II => III ;; 2
\text{b} => \text{b} => \text{a} ;; c
2,500\pi => 2500\pi => 2 ;; 500\pi
1000 => x=1,000 ;; \frac{2,000}{2} => x=1,001 ;; (1,000)
\frac{1\pm\sqrt5}{2} => \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2} ;; x=\frac{1\pm\sqrt5}2 => \frac{1+\sqrt5}{2} ;; 1
\lfloor \frac{n}{2} \rfloor => \lfloor n/2 \rfloor => n/2 ;; n
\frac12 \le x \le \frac32 => 1/2 \le x \le 3/2 => (1/2, 3/2) ;; 1
\begin{pmatrix} 1/3 & 2/3 \\ 2/3 & 1/3 \end{pmatrix} => \begin{pmatrix}\frac13&\frac23\\\frac23&\frac13\end{pmatrix} => 1/3
\left(\begin{array}{c}1\\2\end{array}\right) => \begin{pmatrix}1\\2\end{pmatrix} => \begin{pmatrix}2\\1\end{pmatrix} ;; 1
\binom{2n}{n} => \frac{(2n)!}{n!^2} => 2n ;; (2n)!
f^{-1}(x)=2x+1 => 2x+1 ;; f^{-1}(x)=1+2x => 2x ;; 1
\angle A = 60^\circ => 60 ;; \angle A=60 => 30 ;; \angle B = 60^\circ
\lg 2 => \log_{10} 2 => 2 ;; \ln 2
\arctan x => \operatorname{arctan} x ;; \text{arctan } x => \tan x
\text{East} => east ;; \text{East} => west ;; \text{North} ;; seat
\text{ellipse} => ellipse ;; \text{ellipse} => circle ;; \text{parabola} ;; 1
\text{no solution} => no solution ;; \text{No solution} => 0 ;; solution ;; \text{one solution}
\sum_{k=1}^{n} k => \sum_{k=1}^{n} k => n ;; k ;; 1
\int_0^1 x\,dx => \frac12 ;; \int_0^1 x\,dx => 1 ;; 0 ;; x
"""  # noqa: E501
"""Golds with right and wrong completions, as they stand in a box."""

REFUSED = r"""
\frac{\pi}{4}+k\pi, k \in \mathbb{Z}
\{x \mid x > 1\}
x \equiv 3 \pmod{7}
\begin{cases} x^2 & x>0 \\ 0 & x \le 0 \end{cases}
\triangle ABC
3 4
1/2\pi
3 \text{ million}
5'
C_5^2
P(5,2)
0x1F
5 m
5 feet 6 inches
\text{June 5}
2020-06-05
\textbf{(C)}\ 12
2,2,3
1:2:3
3 \text{ remainder } 2
5 \text{ or more}
\frac{1}{0}
x>1, x \ne 2
It follows that the two sides are equal
see the proof above for all details
\boxed{}
\sqrt{
^{2}
?
"""
"""Golds without one meaning, which are refused before a run."""


def rows(table):
    return [
        tuple(part.strip() for part in line.split("=>")) for line in table.strip("\n").split("\n")
    ]


def scored(gold, completion):
    verify = math_verify("", gold, {})
    try:
        return verify(completion)
    except Exception:  # noqa: BLE001  (what breaks a verifier scores 0 in the sandbox)
        return 0.0


@pytest.mark.reported("math_verify_bare_latex")
@pytest.mark.parametrize(("gold", "right", "wrong"), rows(GOLDS), ids=lambda text: text[:30])
def test_right_answers_score_1_and_wrong_ones_0(gold, right, wrong):
    for completion in (gold, *right.split(" ;; ")):
        assert scored(gold, rf"\boxed{{{completion}}}") == 1.0, completion
    for completion in wrong.split(" ;; "):
        assert scored(gold, rf"\boxed{{{completion}}}") == 0.0, completion
    for form in (rf"${gold}$", rf"\boxed{{{gold}}}", rf"\({gold}\)"):
        assert read(math_answers.gold_in(form)) == read(math_answers.gold_in(gold))


@pytest.mark.parametrize("gold", [row[0] for row in rows(REFUSED)])
def test_golds_with_more_than_one_meaning_are_refused(gold):
    for form in (gold, f"${gold}$", rf"\boxed{{{gold}}}"):
        with pytest.raises(ValueError, match=r"cannot score the answer|has an empty answer"):
            math_verify("", form, {})


COMPLETIONS = [
    # gold, completions that give it, completions that give something else
    (
        "5",
        [
            r"So it is \boxed{5}.",
            r"**\boxed{5}**",
            r"$\boxed{5}$",
            r"$$\boxed{5}$$",
            r"\[\boxed{5}\]",
            r"\(\boxed{5}\)",
            r"\boxed {5}",
            r"\fbox{5}",
            r"First \boxed{4}, no: \boxed{5}",
            r"\boxed{x=5}",
            r"\boxed{5\text{ cm}}",
            r"\boxed{5^\circ}",
            r"\boxed{5.}",
            r"\boxed{$5$}",
            r"\boxed{\$5}",
            r"\boxed{5} because $2+3=5$, as $x \ne 7$.",
            "\\boxed{5}\n\nNote: 7 would be wrong.",
            r"\boxed{\mathbf{5}}",
            r"\boxed{2+3=5}",
            r"\boxed{x=2+3=5}",
            r"x=\boxed{5}\text{ cm}",
            r"\boxed{\begin{aligned} x &= 2+3 \\ &= 5 \end{aligned}}",
            "The answer is 5.",
            "The answer is 5",
            "Answer: 5",
            "**Answer:** 5",
            "**Answer: 5**",
            "Final answer: **5**",
            "## Answer\n5 is the answer: 5",
            "The final answer is $5$. I hope it is correct.",
            "The answer is $\\boxed{5}$",
            "The answer is 5 because 2 + 3 = 5.",
            "Answer: 5 (since 2+3=5)",
            "The answer is 5, which is correct.",
            "The answer is 5. This answer is correct.",
            "Answer: 5\n\nThis answer is right, as 7 - 2 = 5.",
            "The answer is: $$5$$",
            "The answer is:\n\\[ 5 \\]",
            "The answer is $x = 5$.",
            "the answer is \\(5\\), since $7 > 5$",
            "The correct answer is 5 cm.",
            "The answer to the problem is 5.",
            "Therefore, the answer is **5**.\n\nNote that 6 is not.",
            "2 + 3 = 5\n#### 5",
            "#### $5$",
            "so it is $5$",
            "so it is $$5$$.",
            r"so it is \[5\]",
            r"\(5\)",
            r"We get \[ \begin{aligned} x &= 2+3 \\ &= 5 \end{aligned} \]",
            "$2 + 3 = 5$",
            "so x = 5",
            r"\boxed{\angle ABC = 5^\circ}",
            r"\boxed{\text{Area} = 5\text{ cm}^2}",
            r"\boxed{x_{\text{max}} = 5}",
            r"\boxed{a + b = 5}",
            r"\boxed{AB = 5}",
            r"\boxed{|AB| = 5}",
            r"\boxed{\cos A = 5}",
            r"\boxed{P(X=1) = 5}",
            r"\boxed{\approx 5}",
            "= 5",
            "<think>4</think> <answer>5</answer> 6",
            r"It costs \$5.",
            "The answer is approximately 5.",
            r"Hence $x = 5$. $\blacksquare$",
            r"\begin{align*} x &= 2+3 \\ &= 5. \end{align*}",
            "5",
            "5.",
            "I count 5",
            "3 + 2 = 5 apples",
            "The answer is $5$, and that is the solution.",
            "The answer is 5!",
            "the solution is `5`",
            "Solution: We add 2 to 3. So it is $5$.",
            "<think>\\boxed{4}</think>5",
            "Answer: We add both numbers and get what is asked for.\n\nThe sum is $5$.",
        ],
        [
            r"\boxed{5} or rather \boxed{6}",
            r"\boxed{5}, \boxed{6}",
            r"\boxed{5} and \boxed{6}",
            r"\boxed{}",
            "",
            r"\boxed{5",
            "The answer is 6, not 5.",
            "Answer: 6 (5 would be wrong)",
            r"The answer is $5x$.",
            "5 apples and 7 pears",
            "#### 55",
            r"\boxed{5 \text{ or } 6}",
            "-5",
            r"\boxed{15}",
            r"\boxed{5 6}",
            r"\boxed{\text{5 or more}}",
            r"\boxed{x>5}",
            "x5",
            r"2x = \boxed{2x=5}",
            r"\boxed{-x = 5}",
            r"\boxed{x/2 = 5}",
            r"\boxed{x + 1 = 5}",
            r"\boxed{1 \text{ or } x = 5}",
            r"\boxed{\text{not } x = 5}",
            "<answer>6</answer> 5",
            r"\boxed{" * 400,
            "1" * 5000,
            r"\boxed{9^{9^{9}}}",
            "The answer is unknown.",
        ],
    ),
    (
        r"\frac{1}{2}",
        [
            "The answer is 1/2.",
            "The answer is 0.5.",
            "Answer: $\\frac12$",
            "x = 1/2",
            "so it is $\\frac{14}{28}$",
            "$x=\\frac{1}{2}$, which is positive.",
            "The answer is $\\dfrac{1}{2}$ because $2 \\cdot \\frac12 = 1$.",
        ],
        ["The answer is 1.", "1/3", "2"],
    ),
    (
        "1, 2",
        [
            r"\boxed{1} and \boxed{2}",
            r"$x = \boxed{1}$ or $x = \boxed{2}$",
            r"\boxed{1}, \boxed{2}",
            r"The solutions are $x=1$ and $x=2$.",
            "The answers are 1 and 2.",
            r"\boxed{x_1=1, x_2=2}",
            r"\boxed{\begin{cases} x=1 \\ x=2 \end{cases}}",
        ],
        [r"\boxed{1}", r"\boxed{2}", "The answer is 1.", r"\boxed{1}\boxed{2}"],
    ),
    (
        "C",
        [
            "The answer is C.",
            "The answer is (C).",
            "**C**",
            "Answer: **(C)** 12",
            "Answer: C) 12",
            "C",
            "(C)",
            r"\boxed{\text{(C)}\ 12}",
            "The answer is C because A is too small.",
            "The correct answer is **C**.",
            r"The answer is $\textbf{(C)}\ 12$.",
            "Answer: C\n\nThis answer is correct.",
        ],
        [
            "The answer is A.",
            "Answer: Cannot be known",
            "D, not C",
            "AC",
            "",
            "The answer is A or C.",
        ],
    ),
    (
        "yes",
        [
            "The answer is yes.",
            "Yes",
            "**Yes**",
            "Answer: Yes, since it is even.",
            r"\boxed{\text{Yes}}",
        ],
        ["The answer is no.", "No", "Answer: not yes", "The answer is correct."],
    ),
    (
        r"x^2-1",
        [r"\boxed{(x-1)(x+1)}", "The answer is $x^2 - 1$.", "$f(x) = x^2-1$"],
        ["$x^2$", "1"],
    ),
    (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
        ["#### 72", r"\boxed{72}"],
        ["24", "48"],
    ),
    (r"We get $x^2=4$, so $x = \boxed{2}$.", ["2", r"\boxed{x=2}"], ["4", r"\boxed{x^2=4}"]),
]
"""What models write around an answer."""


@pytest.mark.parametrize(
    ("gold", "right", "wrong"), COMPLETIONS, ids=[row[0][:20] for row in COMPLETIONS]
)
def test_the_answer_is_found_in_what_models_write(gold, right, wrong):
    assert [text for text in right if scored(gold, text) != 1.0] == []
    assert [text for text in wrong if scored(gold, text) != 0.0] == []
