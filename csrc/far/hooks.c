/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What programs call instead of libc's and the allocator's functions of these names. Small requests
 * and everything unknown go to the next one of that name.
 */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define EXPORT __attribute__((visibility("default")))
/* Below this an allocation is the next allocator's, and a mapping the kernel's. */
#define ALLOCATION_BYTES_MIN (256u << 10)
#define MAPPING_BYTES_MIN    ((size_t)ISWF_BLOCK_BYTES)
#define EARLY_BYTES          8192u
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif

/* Set while the agent sets itself up, in this thread: what that allocates is not for us. */
static _Thread_local bool inside __attribute__((tls_model("initial-exec")));

/* ------------------------------------------------------------- the next ones */

static struct iswf_real next;
static atomic_bool next_known;
/* Looking up allocates; what it asks for meanwhile lies here, and is never freed. */
static char early[EARLY_BYTES];
static size_t early_used;
static _Thread_local bool looking __attribute__((tls_model("initial-exec")));

static void *early_take(size_t bytes)
{
	size_t at = early_used;

	bytes = (bytes + 15) & ~(size_t)15;
	if (bytes > sizeof(early) - at)
		return NULL;
	early_used = at + bytes;
	return early + at;
}

static bool is_early(const void *at)
{
	return (const char *)at >= early && (const char *)at < early + sizeof(early);
}

static void look_up(void)
{
#define LOOK(name) *(void **)&next.name = dlsym(RTLD_NEXT, #name)
	looking = true;
	LOOK(malloc), LOOK(calloc), LOOK(realloc), LOOK(free), LOOK(memalign);
	LOOK(aligned_alloc), LOOK(posix_memalign), LOOK(malloc_usable_size);
	LOOK(mmap), LOOK(munmap), LOOK(mremap), LOOK(madvise), LOOK(mprotect);
	LOOK(mlock), LOOK(mlock2), LOOK(mlockall), LOOK(prctl), LOOK(syscall);
	LOOK(close), LOOK(close_range), LOOK(closefrom), LOOK(dup2), LOOK(dup3);
	LOOK(pthread_exit), LOOK(pthread_attr_setstack);
	looking = false;
#undef LOOK
	atomic_store_explicit(&next_known, true, memory_order_release);
}

const struct iswf_real *iswf_real(void)
{
	if (__builtin_expect(!atomic_load_explicit(&next_known, memory_order_acquire), 0))
		look_up();
	return &next;
}

#define NEXT (iswf_real())

/* ------------------------------------------------------------- a safe place */

/* A program's call of an allocator's: here threads may be started (F9). */
static bool is_on(void)
{
	sigset_t all, before;
	int phase = atomic_load_explicit(&iswf_phase, memory_order_acquire);
	bool on;

	if (inside)
		return false;
	if (phase != ISWF_OFF && phase != ISWF_WANTED)
		return phase == ISWF_ON;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* a handler may not return */
	inside = true;
	on = iswf_start();
	inside = false;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return on;
}

static void start_if_wanted(void)
{
	if (__builtin_expect(atomic_load_explicit(&iswf_phase, memory_order_relaxed) == ISWF_WANTED,
			     0))
		(void)is_on();
}

static bool errand(enum iswf_errand what, void *at, size_t bytes)
{
	return iswf_do_errand(what, at, bytes, ISWF_WHYS);
}

static void *take(size_t bytes, size_t align)
{
	sigset_t all, before;
	char *at;

	if (iswf_stands_in_arena())
		return NULL;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	at = iswf_take(bytes, align);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return at;
}

static void *take_large(size_t bytes, size_t align)
{
	if (__builtin_expect(bytes < ALLOCATION_BYTES_MIN, 1)) {
		start_if_wanted();
		return NULL;
	}
	return align <= ISWF_BLOCK_BYTES && is_on() ? take(bytes, align) : NULL;
}

static size_t size_of(const void *at)
{
	return (size_t)iswf_size_of(at) * ISWF_PAGE_BYTES;
}

static size_t pages_bytes(size_t bytes)
{
	return (bytes + ISWF_PAGE_BYTES - 1) / ISWF_PAGE_BYTES * ISWF_PAGE_BYTES;
}

/* In a forked child what was ours is memory like any other, and never freed. */
static bool has_agent(void)
{
	return atomic_load_explicit(&iswf_phase, memory_order_acquire) == ISWF_ON;
}

/* ------------------------------------------------------------- allocations */

EXPORT void *malloc(size_t bytes)
{
	void *at = looking ? early_take(bytes) : take_large(bytes, 0);

	return at != NULL || looking ? at : NEXT->malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t each)
{
	size_t bytes;
	void *at = NULL;

	if (looking)
		return __builtin_mul_overflow(count, each, &bytes) ? NULL : early_take(bytes);
	if (!__builtin_mul_overflow(count, each, &bytes))
		at = take_large(bytes, 0);
	return at != NULL ? at : NEXT->calloc(count, each);
}

EXPORT void free(void *at)
{
	if (__builtin_expect(!iswf_is_ours(at), 1)) {
		if (!is_early(at))
			NEXT->free(at);
		return;
	}
	if (has_agent())
		(void)errand(ISWF_GIVE, at, 0);
}

EXPORT size_t malloc_usable_size(void *at)
{
	return iswf_is_ours(at) ? size_of(at) : NEXT->malloc_usable_size(at);
}

/* An allocation that changes hands between us and the next allocator, or moves. */
static void *replace(void *at, size_t old, size_t bytes)
{
	void *now = malloc(bytes);

	if (now == NULL)
		return NULL;
	memcpy(now, at, old < bytes ? old : bytes);
	free(at);
	return now;
}

EXPORT void *realloc(void *at, size_t bytes)
{
	if (at == NULL)
		return malloc(bytes);
	if (is_early(at))
		return replace(at, bytes, bytes);
	if (!iswf_is_ours(at)) {
		/* One that has become large: from then on it is ours. */
		if (bytes >= ALLOCATION_BYTES_MIN && is_on())
			return replace(at, NEXT->malloc_usable_size(at), bytes);
		return NEXT->realloc(at, bytes);
	}
	if (bytes == 0) {
		free(at);
		return NULL;
	}
	if (has_agent() && bytes >= ALLOCATION_BYTES_MIN && errand(ISWF_RESIZE, at, bytes))
		return at;
	return replace(at, size_of(at), bytes);
}

EXPORT void *memalign(size_t align, size_t bytes)
{
	void *at = take_large(bytes, align);

	return at != NULL ? at : NEXT->memalign(align, bytes);
}

EXPORT void *aligned_alloc(size_t align, size_t bytes)
{
	void *at = take_large(bytes, align);

	return at != NULL ? at : NEXT->aligned_alloc(align, bytes);
}

EXPORT int posix_memalign(void **at_out, size_t align, size_t bytes)
{
	void *at = align % sizeof(void *) == 0 && (align & (align - 1)) == 0 && align != 0
			   ? take_large(bytes, align)
			   : NULL;

	if (at == NULL)
		return NEXT->posix_memalign(at_out, align, bytes);
	*at_out = at;
	return 0;
}

/* ------------------------------------------------------------- mappings */

static bool is_large_mapping(const void *at, size_t bytes, int prot, int flags)
{
	return at == NULL && bytes >= MAPPING_BYTES_MIN && prot == (PROT_READ | PROT_WRITE) &&
	       (flags & ~(MAP_NORESERVE | MAP_POPULATE)) == (MAP_PRIVATE | MAP_ANONYMOUS);
}

/* From here on the range is the kernel's alone. */
static void surrender(void *at, size_t bytes, enum iswf_why why)
{
	if (has_agent() && bytes != 0)
		(void)iswf_do_errand(ISWF_HAND_BACK, at, bytes, why);
}

EXPORT void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
	if (is_large_mapping(at, bytes, prot, flags) && !inside) {
		int off = ISWF_OFF;
		void *taken;

		/* An allocator may be in the middle of something: not a place to begin at (F9). */
		if (!has_agent())
			(void)atomic_compare_exchange_strong(&iswf_phase, &off, ISWF_WANTED);
		else if ((taken = take(bytes, ISWF_BLOCK_BYTES)) != NULL)
			return taken;
	}
	if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) && iswf_is_ours(at))
		surrender(at, bytes, ISWF_WHY_FIXED);
	return NEXT->mmap(at, bytes, prot, flags, fd, offset);
}

EXPORT void *mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
	return mmap(at, bytes, prot, flags, fd, offset);
}

EXPORT int munmap(void *at, size_t bytes)
{
	if (!iswf_is_ours(at) || !has_agent() || (uintptr_t)at % ISWF_PAGE_BYTES != 0 || bytes == 0)
		return NEXT->munmap(at, bytes);
	(void)errand(ISWF_GIVE_PART, at, bytes);
	return 0;
}

EXPORT void *mremap(void *at, size_t old, size_t bytes, int flags, ...)
{
	void *to, *now;
	va_list more;

	va_start(more, flags);
	to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
	va_end(more);
	if (!iswf_is_ours(at) || !has_agent())
		return NEXT->mremap(at, old, bytes, flags, to);
	/* A part of a mapping, or one over which something else is laid: the kernel's affair. */
	if (flags & MREMAP_FIXED || bytes == 0 || size_of(at) != pages_bytes(old)) {
		surrender(at, old, ISWF_WHY_MOVED);
		return NEXT->mremap(at, old, bytes, flags, to);
	}
	if (errand(ISWF_RESIZE, at, bytes))
		return at;
	if (!(flags & MREMAP_MAYMOVE)) {
		errno = ENOMEM;
		return MAP_FAILED;
	}
	now = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (now == MAP_FAILED)
		return MAP_FAILED;
	memcpy(now, at, old < bytes ? old : bytes);
	(void)errand(ISWF_GIVE_PART, at, old);
	return now;
}

EXPORT int madvise(void *at, size_t bytes, int advice)
{
	if (!iswf_is_ours(at) || !has_agent() || (uintptr_t)at % ISWF_PAGE_BYTES != 0)
		return NEXT->madvise(at, bytes, advice);
	switch (advice) {
	case MADV_DONTNEED:
	case MADV_FREE:
		if (bytes != 0)
			(void)errand(ISWF_DISCARD_RANGE, at, bytes);
		return 0;
	case MADV_NORMAL:
	case MADV_RANDOM:
	case MADV_SEQUENTIAL:
	case MADV_WILLNEED:
	case MADV_HUGEPAGE:
	case MADV_NOHUGEPAGE:
	case MADV_COLD:
	case MADV_PAGEOUT:
		return 0; /* advice that would only split our range */
	default:
		surrender(at, bytes, ISWF_WHY_ADVICE);
		return NEXT->madvise(at, bytes, advice);
	}
}

EXPORT int mprotect(void *at, size_t bytes, int prot)
{
	if (iswf_is_ours(at) && prot != (PROT_READ | PROT_WRITE))
		surrender(at, bytes, ISWF_WHY_PROTECTED);
	return NEXT->mprotect(at, bytes, prot);
}

EXPORT int mlock(const void *at, size_t bytes)
{
	if (iswf_is_ours(at))
		surrender((void *)(uintptr_t)at, bytes, ISWF_WHY_LOCKED);
	return NEXT->mlock(at, bytes);
}

EXPORT int mlock2(const void *at, size_t bytes, unsigned int flags)
{
	if (iswf_is_ours(at))
		surrender((void *)(uintptr_t)at, bytes, ISWF_WHY_LOCKED);
	return NEXT->mlock2(at, bytes, flags);
}

EXPORT int mlockall(int flags)
{
	iswf_end();
	return NEXT->mlockall(flags);
}

EXPORT int prctl(int option, ...)
{
	unsigned long a[4];
	va_list more;

	va_start(more, option);
	for (int i = 0; i < 4; i++)
		a[i] = va_arg(more, unsigned long);
	va_end(more);
	/* A name for a part of our range would split it. */
	if (option == PR_SET_VMA && iswf_is_ours((void *)a[1]))
		return 0;
	return NEXT->prctl(option, a[0], a[1], a[2], a[3]);
}

EXPORT long syscall(long number, ...)
{
	long a[6];
	va_list more;

	va_start(more, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(more, long);
	va_end(more);
	if (number == SYS_close)
		return close((int)a[0]);
#ifdef SYS_close_range
	if (number == SYS_close_range)
		return close_range((unsigned int)a[0], (unsigned int)a[1], (int)a[2]);
#endif
#ifdef SYS_mbind
	if (number == SYS_mbind && iswf_is_ours((void *)a[0]))
		surrender((void *)a[0], (size_t)a[1], ISWF_WHY_POLICY);
#endif
	return NEXT->syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ------------------------------------------------------------- threads */

EXPORT _Noreturn void pthread_exit(void *value)
{
	iswf_leave_thread();
	NEXT->pthread_exit(value);
	abort(); /* it does not return */
}

/* The kernel writes there when the thread ends, and then waits for no page: who joins would wait
 * for ever. */
EXPORT int pthread_attr_setstack(pthread_attr_t *attr, void *at, size_t bytes)
{
	if (iswf_is_ours(at))
		surrender(at, bytes, ISWF_WHY_STACK);
	return NEXT->pthread_attr_setstack(attr, at, bytes);
}

/* ------------------------------------------------------------- descriptors */

EXPORT int close(int fd)
{
	if (iswf_spares(fd)) { /* as if it were none */
		errno = EBADF;
		return -1;
	}
	return NEXT->close(fd);
}

EXPORT int close_range(unsigned int first, unsigned int last, int flags)
{
	for (int own;
	     first <= last && (own = iswf_next_own(first)) >= 0 && (unsigned int)own <= last;
	     first = (unsigned int)own + 1) {
		int code = (unsigned int)own > first
				   ? NEXT->close_range(first, (unsigned int)own - 1, flags)
				   : 0;

		if (code != 0)
			return code;
		if ((unsigned int)own == last)
			return 0;
	}
	return NEXT->close_range(first, last, flags);
}

EXPORT void closefrom(int first)
{
	(void)close_range(first < 0 ? 0 : (unsigned int)first, ~0u, 0);
}

EXPORT int dup2(int fd, int to)
{
	if (iswf_spares(to)) {
		errno = EBADF;
		return -1;
	}
	return NEXT->dup2(fd, to);
}

EXPORT int dup3(int fd, int to, int flags)
{
	if (iswf_spares(to)) {
		errno = EBADF;
		return -1;
	}
	return NEXT->dup3(fd, to, flags);
}
