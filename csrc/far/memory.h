/* SPDX-License-Identifier: Apache-2.0 */
/* What operations on memory (memory.c) and the kernel's messages about it (messages.c) share. */
#ifndef ISWF_MEMORY_H
#define ISWF_MEMORY_H

#include "far/agent.h"

#define ISWF_AGAIN_NS 20000u

extern int iswf_uffd;

void iswf_pause(uint64_t ns);
/*
 * Between the two no event is read. False: one was, and is not served yet. F3: an operation that
 * changes the arena is done between the two.
 */
bool iswf_enter(void);
void iswf_leave(void);
/* Between the two the kernel's events of discards in this range are our own; one thread. */
void iswf_begin_discard(const char *at, size_t bytes);
void iswf_end_discard(void);

#endif
