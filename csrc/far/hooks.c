/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What programs call instead of libc's and the allocator's functions of these names. Small requests
 * and everything unknown go to the next one of that name.
 */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <linux/sched.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define EXPORT __attribute__((visibility("default")))
/* Below this an allocation is the next allocator's, and a mapping the kernel's. */
#define ALLOCATION_BYTES_MIN (256u << 10)
#define MAPPING_BYTES_MIN    ((size_t)ISWF_BLOCK_BYTES)
#define EARLY_BYTES          8192u
#define EARLY_ALIGN          16u
#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef SYS_close_range /* Linux 5.9 */
#define SYS_close_range 436
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif

/* Set while the agent sets itself up, in this thread: what that allocates is not for us. */
static _Thread_local bool inside __attribute__((tls_model("initial-exec")));

/* ------------------------------------------------------------- the next ones */

static struct iswf_real next;
static atomic_bool next_known;
/* Looking up allocates; what it asks for meanwhile lies here behind its size, and is never freed.
 */
static char early[EARLY_BYTES] __attribute__((aligned(EARLY_ALIGN)));
static atomic_size_t early_used;
static _Thread_local bool looking __attribute__((tls_model("initial-exec")));

static void *early_take(size_t bytes)
{
	size_t whole = (bytes + 2 * EARLY_ALIGN - 1) / EARLY_ALIGN * EARLY_ALIGN, at;

	if (bytes > sizeof(early))
		return NULL;
	at = atomic_fetch_add(&early_used, whole);
	if (at > sizeof(early) - whole)
		return NULL;
	memcpy(early + at, &bytes, sizeof(bytes));
	return early + at + EARLY_ALIGN;
}

static bool is_early(const void *at)
{
	return (const char *)at >= early && (const char *)at < early + sizeof(early);
}

static size_t early_size(const void *at)
{
	size_t bytes;

	memcpy(&bytes, (const char *)at - EARLY_ALIGN, sizeof(bytes));
	return bytes;
}

static void look_up(void)
{
#define LOOK(name) *(void **)&next.name = dlsym(RTLD_NEXT, #name)
	looking = true;
	LOOK(malloc), LOOK(calloc), LOOK(realloc), LOOK(free), LOOK(memalign);
	LOOK(aligned_alloc), LOOK(posix_memalign), LOOK(malloc_usable_size);
	LOOK(mmap), LOOK(munmap), LOOK(mremap), LOOK(madvise), LOOK(mprotect);
	LOOK(mlock), LOOK(mlock2), LOOK(mlockall), LOOK(prctl), LOOK(syscall), LOOK(ioctl);
	LOOK(close), LOOK(close_range), LOOK(closefrom), LOOK(dup2), LOOK(dup3);
	*(void **)&next.fork_alone = dlsym(RTLD_NEXT, "_Fork");
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

static int errand(enum iswf_errand what, void *at, size_t bytes)
{
	return iswf_do_errand(what, at, bytes, ISWF_WHYS);
}

static void *take(size_t bytes, size_t align, enum iswf_request request)
{
	sigset_t all, before;
	int cancels;
	char *at;

	if (iswf_stands_in_arena())
		return NULL;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancels);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	at = iswf_take(bytes, align, request);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_setcancelstate(cancels, NULL);
	return at;
}

/* align: 0, or a power of two. */
static void *take_large(size_t bytes, size_t align, enum iswf_request request)
{
	if (__builtin_expect(bytes < ALLOCATION_BYTES_MIN, 1)) {
		start_if_wanted();
		return NULL;
	}
	if (align > ISWF_BLOCK_BYTES || (align & (align - 1)) != 0)
		return NULL;
	return is_on() ? take(bytes, align, request) : NULL;
}

/* 0: it is no allocation of ours. The kernel's memory may lie in a hole of the arena, and another
 * allocator's first allocation where its mapping begins. */
static size_t size_of(const void *at)
{
	return (size_t)iswf_size_of(at) * ISWF_PAGE_BYTES;
}

static size_t pages_bytes(size_t bytes)
{
	return (bytes + ISWF_PAGE_BYTES - 1) / ISWF_PAGE_BYTES * ISWF_PAGE_BYTES;
}

static bool has_agent(void)
{
	return atomic_load_explicit(&iswf_phase, memory_order_acquire) == ISWF_ON;
}

/* In a forked child what was ours is memory like any other. */
static void free_copy(void *at, size_t bytes)
{
	int err = errno;

	iswf_disown(at, bytes);
	(void)NEXT->munmap(at, bytes);
	errno = err;
}

/* ------------------------------------------------------------- allocations */

EXPORT void *malloc(size_t bytes)
{
	void *at = looking ? early_take(bytes) : take_large(bytes, 0, ISWF_MALLOC);

	return at != NULL || looking ? at : NEXT->malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t each)
{
	size_t bytes;
	void *at = NULL;

	if (looking)
		return __builtin_mul_overflow(count, each, &bytes) ? NULL : early_take(bytes);
	if (!__builtin_mul_overflow(count, each, &bytes))
		at = take_large(bytes, 0, ISWF_CALLOC);
	return at != NULL ? at : NEXT->calloc(count, each);
}

EXPORT void free(void *at)
{
	size_t bytes = size_of(at);

	if (__builtin_expect(bytes == 0, 1)) {
		if (at != NULL && !is_early(at))
			NEXT->free(at);
	} else if (has_agent()) {
		(void)errand(ISWF_GIVE, at, 0);
	} else {
		free_copy(at, bytes);
	}
}

EXPORT size_t malloc_usable_size(void *at)
{
	size_t bytes = size_of(at);

	if (bytes != 0)
		return bytes;
	return is_early(at) ? early_size(at) : NEXT->malloc_usable_size(at);
}

/* The program's bytes, at `now`, which may be NULL: then nothing changes. */
static void *replace(void *at, size_t old, void *now, size_t bytes)
{
	if (now == NULL)
		return NULL;
	memcpy(now, at, old < bytes ? old : bytes);
	free(at);
	return now;
}

EXPORT void *realloc(void *at, size_t bytes)
{
	size_t old = size_of(at);
	void *now;

	if (at == NULL)
		return malloc(bytes);
	if (is_early(at))
		return replace(at, early_size(at), malloc(bytes), bytes);
	if (old == 0) {
		/* One that has become large: from then on it is ours. */
		now = take_large(bytes, 0, ISWF_MALLOC);
		if (now == NULL)
			return NEXT->realloc(at, bytes);
		return replace(at, NEXT->malloc_usable_size(at), now, bytes);
	}
	if (bytes == 0) {
		free(at);
		return NULL;
	}
	if (has_agent() && bytes >= ALLOCATION_BYTES_MIN && errand(ISWF_RESIZE, at, bytes))
		return at;
	return replace(at, old, malloc(bytes), bytes);
}

EXPORT void *memalign(size_t align, size_t bytes)
{
	void *at = take_large(bytes, align, ISWF_MALLOC);

	return at != NULL ? at : NEXT->memalign(align, bytes);
}

EXPORT void *aligned_alloc(size_t align, size_t bytes)
{
	void *at = take_large(bytes, align, ISWF_MALLOC);

	return at != NULL ? at : NEXT->aligned_alloc(align, bytes);
}

EXPORT int posix_memalign(void **at_out, size_t align, size_t bytes)
{
	int err = errno; /* which it leaves as it is */
	void *at = align % sizeof(void *) == 0 && align != 0 ? take_large(bytes, align, ISWF_MALLOC)
							     : NULL;

	errno = err;
	if (at == NULL)
		return NEXT->posix_memalign(at_out, align, bytes);
	*at_out = at;
	return 0;
}

/* ------------------------------------------------------------- mappings */

/* What of whole pages from `at` on is in the arena; bytes 0: nothing, or there is no agent. */
struct part {
	char *at;
	size_t bytes;
};

static struct part part_of(const void *at, size_t bytes)
{
	uintptr_t from = (uintptr_t)at, end = from + pages_bytes(bytes);
	uintptr_t arena = (uintptr_t)iswf_agent.arena;
	uintptr_t arena_end =
		arena + (uintptr_t)atomic_load(&iswf_agent.blocks_count) * ISWF_BLOCK_BYTES;
	struct part none = {NULL, 0};

	/* The kernel refuses what is no range of pages. */
	if (arena == 0 || from % ISWF_PAGE_BYTES != 0 || end <= from)
		return none;
	if (from < arena)
		from = arena;
	if (end > arena_end)
		end = arena_end;
	return from < end ? (struct part){(char *)from, end - from} : none;
}

/* An address without MAP_FIXED is a wish, which allocators such as mimalloc have for each mapping.
 */
static bool is_large_mapping(size_t bytes, int prot, int flags)
{
	return bytes >= MAPPING_BYTES_MIN && prot == (PROT_READ | PROT_WRITE) &&
	       (flags & ~(MAP_NORESERVE | MAP_POPULATE)) == (MAP_PRIVATE | MAP_ANONYMOUS);
}

/* What is in the arena of that is the kernel's from here on; with ISWF_LAY_OVER for anything. */
static void give_up(enum iswf_errand errand, const void *at, size_t bytes, enum iswf_why why)
{
	struct part part = part_of(at, bytes);

	if (part.bytes == 0)
		return;
	if (has_agent())
		(void)iswf_do_errand(errand, part.at, part.bytes, why);
	else if (errand == ISWF_LAY_OVER)
		iswf_disown(part.at, part.bytes);
}

static void surrender(const void *at, size_t bytes, enum iswf_why why)
{
	give_up(ISWF_HAND_BACK, at, bytes, why);
}

EXPORT void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
	if (is_large_mapping(bytes, prot, flags) && !inside) {
		int off = ISWF_OFF;
		void *taken;

		/* An allocator may be in the middle of something: not a place to begin at (F9). */
		if (!has_agent())
			(void)atomic_compare_exchange_strong(&iswf_phase, &off, ISWF_WANTED);
		else if ((taken = take(bytes, ISWF_BLOCK_BYTES, ISWF_MAPPING)) != NULL)
			return taken;
	}
	if ((flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) == MAP_FIXED)
		give_up(ISWF_LAY_OVER, at, bytes, ISWF_WHY_FIXED);
	return NEXT->mmap(at, bytes, prot, flags, fd, offset);
}

EXPORT void *mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
	return mmap(at, bytes, prot, flags, fd, offset);
}

/* What of the range is not in the arena: advice -1: it is unmapped. */
static int outside(const struct part *part, void *at, size_t bytes, int advice)
{
	char *begins[] = {at, part->at + part->bytes};
	char *ends[] = {part->at, (char *)at + pages_bytes(bytes)};
	int code = 0;

	for (uint32_t i = 0; i < 2 && code == 0; i++) {
		size_t rest = (size_t)(ends[i] - begins[i]);

		if (rest != 0)
			code = advice < 0 ? NEXT->munmap(begins[i], rest)
					  : NEXT->madvise(begins[i], rest, advice);
	}
	return code;
}

static int around(const struct part *part, void *at, size_t bytes, enum iswf_errand what,
		  int advice)
{
	int code = errand(what, part->at, part->bytes);

	if (outside(part, at, bytes, advice) != 0)
		return -1;
	if (code != 0)
		errno = -code;
	return code != 0 ? -1 : 0;
}

EXPORT int munmap(void *at, size_t bytes)
{
	struct part part = part_of(at, bytes);

	if (part.bytes != 0 && has_agent())
		return around(&part, at, bytes, ISWF_UNMAP, -1);
	if (part.bytes != 0)
		iswf_disown(part.at, part.bytes);
	return NEXT->munmap(at, bytes);
}

/* A whole mapping, which the agent moves. */
static void *remap(void *at, size_t old, size_t bytes, int flags)
{
	void *now;

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
	(void)errand(ISWF_UNMAP, at, pages_bytes(old));
	return now;
}

EXPORT void *mremap(void *at, size_t old, size_t bytes, int flags, ...)
{
	void *to;
	va_list more;

	va_start(more, flags);
	to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
	va_end(more);
	if (bytes == 0 || old == 0)
		return NEXT->mremap(at, old, bytes, flags, to);
	if (!(flags & ~MREMAP_MAYMOVE) && has_agent() &&
	    (size_t)iswf_size_of_mapping(at) * ISWF_PAGE_BYTES == pages_bytes(old))
		return remap(at, old, bytes, flags);
	/* A part of a mapping, or one over which something else is laid: the kernel's affair. */
	give_up(ISWF_LAY_OVER, at, old, ISWF_WHY_MOVED);
	if (flags & MREMAP_FIXED)
		give_up(ISWF_LAY_OVER, to, bytes, ISWF_WHY_FIXED);
	return NEXT->mremap(at, old, bytes, flags, to);
}

EXPORT int madvise(void *at, size_t bytes, int advice)
{
	struct part part = part_of(at, bytes);

	if (part.bytes == 0 || !has_agent())
		return NEXT->madvise(at, bytes, advice);
	switch (advice) {
	case MADV_DONTNEED:
		return around(&part, at, bytes, ISWF_DISCARD_RANGE, advice);
	case MADV_FREE:
		return around(&part, at, bytes, ISWF_FREE_RANGE, advice);
	case MADV_NORMAL:
	case MADV_RANDOM:
	case MADV_SEQUENTIAL:
	case MADV_WILLNEED:
	case MADV_HUGEPAGE:
	case MADV_NOHUGEPAGE:
	case MADV_COLD:
	case MADV_PAGEOUT:
		/* Advice that would only split our range. */
		return outside(&part, at, bytes, advice);
	case MADV_POPULATE_READ:
	case MADV_POPULATE_WRITE:
		break; /* faults like any other */
	default:
		surrender(at, bytes, ISWF_WHY_ADVICE);
	}
	return NEXT->madvise(at, bytes, advice);
}

EXPORT int mprotect(void *at, size_t bytes, int prot)
{
	if (prot != (PROT_READ | PROT_WRITE))
		surrender(at, bytes, ISWF_WHY_PROTECTED);
	return NEXT->mprotect(at, bytes, prot);
}

/* From the page in which the range begins. */
static void surrender_locked(const void *at, size_t bytes)
{
	size_t before = (uintptr_t)at % ISWF_PAGE_BYTES;

	surrender((const char *)at - before, bytes + before, ISWF_WHY_LOCKED);
}

EXPORT int mlock(const void *at, size_t bytes)
{
	surrender_locked(at, bytes);
	return NEXT->mlock(at, bytes);
}

EXPORT int mlock2(const void *at, size_t bytes, unsigned int flags)
{
	surrender_locked(at, bytes);
	if (NEXT->mlock2 == NULL) /* glibc before 2.27 */
		return (int)NEXT->syscall(SYS_mlock2, at, bytes, flags);
	return NEXT->mlock2(at, bytes, flags);
}

EXPORT int mlockall(int flags)
{
	iswf_end();
	return NEXT->mlockall(flags);
}

/*
 * Every reserved byte counts against a limit of addresses, and the program counts on them all.
 * Called by no exported name: the program may have a function of that name, which calls syscall().
 */
static int set_limit(pid_t pid, int resource, const void *limit, void *old)
{
	bool is_own = (pid == 0 || pid == getpid()) && iswf_is_owner();
	struct rlimit now, then;

	if (is_own && limit != NULL && (resource == RLIMIT_AS || resource == RLIMIT_DATA)) {
		memcpy(&then, limit, sizeof(then));
		if (getrlimit((__rlimit_resource_t)resource, &now) == 0 &&
		    then.rlim_cur < now.rlim_cur && then.rlim_cur <= then.rlim_max)
			iswf_end();
	}
	return (int)NEXT->syscall(SYS_prlimit64, pid, resource, limit, old);
}

EXPORT int prlimit(pid_t pid, __rlimit_resource_t resource, const struct rlimit *limit,
		   struct rlimit *old)
{
	return set_limit(pid, (int)resource, limit, old);
}

EXPORT int setrlimit(__rlimit_resource_t resource, const struct rlimit *limit)
{
	return set_limit(0, (int)resource, limit, NULL);
}

/* Their other names, for programs that are built for files of any size. */
EXPORT int prlimit64(pid_t pid, __rlimit_resource_t resource, const struct rlimit64 *limit,
		     struct rlimit64 *old)
{
	return set_limit(pid, (int)resource, limit, old);
}

EXPORT int setrlimit64(__rlimit_resource_t resource, const struct rlimit64 *limit)
{
	return set_limit(0, (int)resource, limit, NULL);
}

/* Another userfaultfd on the range: ours makes room. */
EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list more;
	void *arg;

	va_start(more, request);
	arg = va_arg(more, void *);
	va_end(more);
	if (request == UFFDIO_REGISTER && has_agent() && arg != NULL) {
		const struct uffdio_register *range = arg;

		surrender((void *)(uintptr_t)range->range.start, range->range.len, ISWF_WHY_ADVICE);
	}
	return NEXT->ioctl(fd, request, arg);
}

EXPORT int prctl(int option, ...)
{
	unsigned long a[4];
	va_list more;

	va_start(more, option);
	for (int i = 0; i < 4; i++)
		a[i] = va_arg(more, unsigned long);
	va_end(more);
	if (option == PR_SET_SECCOMP) /* it may forbid what the agent does */
		iswf_end();
	/* A name for a part of our range would split it. */
	if (option == PR_SET_VMA && part_of((void *)a[1], a[2]).bytes != 0)
		return 0;
	return NEXT->prctl(option, a[0], a[1], a[2], a[3]);
}

/* Forks that run no handlers. */
static bool is_fork(long number, const long a[6])
{
#ifdef SYS_fork
	if (number == SYS_fork)
		return true;
#endif
	if (number == SYS_clone)
		return !(a[0] & CLONE_VM);
#ifdef SYS_clone3
	if (number == SYS_clone3 && a[0] != 0)
		return !(((const struct clone_args *)a[0])->flags & CLONE_VM);
#endif
	return false;
}

static long forked(long pid)
{
	int err = errno;

	if (pid == 0)
		iswf_in_child();
	else
		iswf_after_fork();
	errno = err;
	return pid;
}

EXPORT pid_t _Fork(void)
{
	iswf_before_fork();
	return (pid_t)forked(NEXT->fork_alone != NULL
				     ? NEXT->fork_alone()
				     : NEXT->syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
}

/* The kernel tells of these once the arena is watched. */
static void hear(long number, const long a[6])
{
	if (iswf_agent.watched)
		return;
	if (number == SYS_munmap || number == SYS_mremap)
		give_up(ISWF_LAY_OVER, (void *)a[0], (size_t)a[1], ISWF_WHY_MOVED);
	if (number == SYS_mremap && a[3] & MREMAP_FIXED)
		give_up(ISWF_LAY_OVER, (void *)a[4], (size_t)a[2], ISWF_WHY_FIXED);
	if (number == SYS_mmap && (a[3] & (MAP_FIXED | MAP_FIXED_NOREPLACE)) == MAP_FIXED)
		give_up(ISWF_LAY_OVER, (void *)a[0], (size_t)a[1], ISWF_WHY_FIXED);
}

EXPORT long syscall(long number, ...)
{
	long a[6];
	va_list more;

	va_start(more, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(more, long);
	va_end(more);
	if (number == SYS_seccomp) /* it may forbid what the agent does */
		iswf_end();
	if (number == SYS_mlockall)
		return mlockall((int)a[0]);
#ifdef SYS_setrlimit
	if (number == SYS_setrlimit)
		return set_limit(0, (int)a[0], (void *)a[1], NULL);
#endif
	if (number == SYS_prlimit64)
		return set_limit((pid_t)a[0], (int)a[1], (void *)a[2], (void *)a[3]);
	if (number == SYS_close)
		return close((int)a[0]);
	if (number == SYS_close_range)
		return close_range((unsigned int)a[0], (unsigned int)a[1], (int)a[2]);
#ifdef SYS_mbind
	if (number == SYS_mbind)
		surrender((void *)a[0], (size_t)a[1], ISWF_WHY_POLICY);
#endif
	hear(number, a);
	if (is_fork(number, a)) {
		iswf_before_fork();
		return forked(NEXT->syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]));
	}
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

static int next_close_range(unsigned int first, unsigned int last, int flags)
{
	if (NEXT->close_range == NULL) /* glibc before 2.34 */
		return (int)NEXT->syscall(SYS_close_range, first, last, flags);
	return NEXT->close_range(first, last, flags);
}

EXPORT int close_range(unsigned int first, unsigned int last, int flags)
{
	for (int own;
	     first <= last && (own = iswf_next_own(first)) >= 0 && (unsigned int)own <= last;
	     first = (unsigned int)own + 1) {
		int code = (unsigned int)own > first
				   ? next_close_range(first, (unsigned int)own - 1, flags)
				   : 0;

		if (code != 0)
			return code;
		if ((unsigned int)own == last)
			return 0;
	}
	return next_close_range(first, last, flags);
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
