/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernel does for the agent: the ranges, the operations on them, and the reader. The
 * kernel refuses operations with EAGAIN while an event is unread; they are tried again a moment
 * later, by threads that hold no lock (F6).
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#ifndef UFFDIO_MOVE /* Linux 6.8 */
struct uffdio_move {
	__u64 dst, src, len, mode;
	__s64 move;
};
#define UFFDIO_MOVE                      _IOWR(UFFDIO, 0x05, struct uffdio_move)
#define UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES ((__u64)1 << 1)
#endif
#ifndef UFFD_FEATURE_MOVE
#define UFFD_FEATURE_MOVE (1 << 16)
#endif
#ifndef UFFD_FEATURE_POISON
#define UFFD_FEATURE_POISON (1 << 14)
#endif
#ifndef UFFDIO_POISON /* Linux 6.6 */
struct uffdio_poison {
	struct uffdio_range range;
	__u64 mode;
	__s64 updated;
};
#define UFFDIO_POISON _IOWR(UFFDIO, 0x08, struct uffdio_poison)
#endif
#ifndef USERFAULTFD_IOC_NEW /* Linux 6.1 */
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

#define AGAIN_NS   20000
#define MESSAGES   (1u << 14)
#define BATCH      32u
#define HUGE_BYTES ISWF_BLOCK_BYTES

#define A (&iswf_agent)

static int uffd = -1;

static void pause_ns(long ns)
{
	const struct timespec time = {.tv_nsec = ns};

	nanosleep(&time, NULL);
}

static void futex_wait(atomic_uint *word, unsigned int value)
{
	(void)iswf_real()->syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word)
{
	(void)iswf_real()->syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ------------------------------------------------------------------- operations */

/* One ioctl over a range that says how far it came; `done_out`: bytes. */
static int whole_range(unsigned long request, void *arg, __u64 *at, __u64 *from, __u64 *left,
		       __s64 *came, size_t *done_out)
{
	*done_out = 0;
	while (*left > 0) {
		*came = 0;
		if (ioctl(uffd, request, arg) == 0) {
			*done_out += *left;
			return 0;
		}
		if (errno != EAGAIN)
			return -errno;
		if (*came > 0) {
			*at += (__u64)*came;
			if (from != NULL)
				*from += (__u64)*came;
			*left -= (__u64)*came;
			*done_out += (size_t)*came;
		} else {
			pause_ns(AGAIN_NS);
		}
	}
	return 0;
}

static int real_move(char *to, char *from, size_t bytes, size_t *moved_out)
{
	struct uffdio_move move = {
		.dst = (uintptr_t)to,
		.src = (uintptr_t)from,
		.len = bytes,
		.mode = UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES,
	};

	return whole_range(UFFDIO_MOVE, &move, &move.dst, &move.src, &move.len, &move.move,
			   moved_out);
}

static void real_wake(char *at, size_t bytes)
{
	struct uffdio_range range = {(uintptr_t)at, bytes};

	(void)ioctl(uffd, UFFDIO_WAKE, &range);
}

/* A page that is there already is passed over; of a range that is gone nothing is left to do. */
static int real_copy(char *to, const char *from, size_t bytes)
{
	struct uffdio_copy copy = {
		.dst = (uintptr_t)to,
		.src = (uintptr_t)from,
		.len = bytes,
	};
	size_t done;

	for (;;) {
		int code = whole_range(UFFDIO_COPY, &copy, &copy.dst, &copy.src, &copy.len,
				       &copy.copy, &done);

		/* Over more than one mapping the kernel copies nothing: then page by page. */
		if (code == -ENOENT && copy.len > ISWF_PAGE_BYTES) {
			for (__u64 at = 0; at < copy.len; at += ISWF_PAGE_BYTES) {
				code = real_copy((char *)(uintptr_t)(copy.dst + at),
						 (const char *)(uintptr_t)(copy.src + at),
						 ISWF_PAGE_BYTES);
				if (code != 0)
					return code;
			}
			return 0;
		}
		if (code == -ENOENT || code == -ESRCH) {
			real_wake(to, bytes);
			return 0;
		}
		if (code != -EEXIST)
			return code;
		copy.dst += ISWF_PAGE_BYTES;
		copy.src += ISWF_PAGE_BYTES;
		copy.len -= ISWF_PAGE_BYTES;
	}
}

static int real_zero(char *at, size_t bytes)
{
	struct uffdio_zeropage zero = {.range = {(uintptr_t)at, bytes}};
	size_t done;

	return whole_range(UFFDIO_ZEROPAGE, &zero, &zero.range.start, NULL, &zero.range.len,
			   &zero.zeropage, &done);
}

static int real_poison(char *at, size_t bytes)
{
	struct uffdio_poison poison = {.range = {(uintptr_t)at, bytes}};
	size_t done;

	return whole_range(UFFDIO_POISON, &poison, &poison.range.start, NULL, &poison.range.len,
			   &poison.updated, &done);
}

/*
 * The reader tells our own discards from the program's. One of ours is under way at a time; it ends
 * when the reader has seen its event, not when the kernel says that the event was read: by then the
 * reader may not have looked at it yet.
 */
static pthread_mutex_t discard_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uintptr_t own_from, own_end; /* seq_cst, with the reader */
static atomic_uint own_unseen;             /* pages; a futex */

static void real_discard(char *at, size_t bytes, bool is_watched)
{
	if (!is_watched) {
		(void)iswf_real()->madvise(at, bytes, MADV_DONTNEED);
		return;
	}
	pthread_mutex_lock(&discard_lock);
	atomic_store(&own_end, (uintptr_t)at + bytes);
	atomic_store(&own_unseen, (unsigned int)(bytes / ISWF_PAGE_BYTES));
	atomic_store(&own_from, (uintptr_t)at);
	if (iswf_real()->madvise(at, bytes, MADV_DONTNEED) == 0)
		for (unsigned int unseen; (unseen = atomic_load(&own_unseen)) != 0;)
			futex_wait(&own_unseen, unseen);
	atomic_store(&own_unseen, 0);
	atomic_store(&own_from, 0);
	pthread_mutex_unlock(&discard_lock);
}

static int real_leave(char *at, size_t bytes, bool children)
{
	struct uffdio_range range = {(uintptr_t)at, bytes};

	if (ioctl(uffd, UFFDIO_UNREGISTER, &range) != 0)
		return -errno;
	if (children)
		(void)iswf_real()->madvise(at, bytes, MADV_DOFORK);
	return 0;
}

const struct iswf_ops iswf_real_ops = {
	.move = real_move,
	.copy = real_copy,
	.zero = real_zero,
	.poison = real_poison,
	.wake = real_wake,
	.discard = real_discard,
	.leave = real_leave,
	.ask = iswf_link_ask,
};

/* ------------------------------------------------------------------- ranges */

int iswf_memory_open(int device_fd)
{
	struct uffdio_api api = {
		.api = UFFD_API,
		.features = UFFD_FEATURE_MOVE | UFFD_FEATURE_POISON | UFFD_FEATURE_EVENT_REMAP |
			    UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP,
	};
	int fd = -1;

	if (device_fd >= 0)
		fd = ioctl(device_fd, USERFAULTFD_IOC_NEW, O_CLOEXEC);
	if (fd < 0)
		fd = (int)iswf_real()->syscall(SYS_userfaultfd, O_CLOEXEC);
	uffd = iswf_own_fd(fd);
	if (uffd >= 0 && ioctl(uffd, UFFDIO_API, &api) != 0)
		return -errno;
	return uffd;
}

/* Addresses alone, aligned to a block, that forked children do not get. */
static char *reserve(size_t bytes)
{
	char *at = iswf_real()->mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *aligned;

	if (at == MAP_FAILED)
		return NULL;
	aligned = (char *)(((uintptr_t)at + HUGE_BYTES - 1) & ~((uintptr_t)HUGE_BYTES - 1));
	if (aligned > at)
		iswf_real()->munmap(at, (size_t)(aligned - at));
	iswf_real()->munmap(aligned + bytes, (size_t)(at + HUGE_BYTES - aligned));
	(void)iswf_real()->madvise(aligned, bytes, MADV_HUGEPAGE);
	(void)iswf_real()->madvise(aligned, bytes, MADV_DONTFORK);
	return aligned;
}

static int watch(char *at, size_t bytes)
{
	struct uffdio_register range = {
		.range = {(uintptr_t)at, bytes},
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};

	return ioctl(uffd, UFFDIO_REGISTER, &range) == 0 ? 0 : -errno;
}

/* Unregistered first: the munmap of a registered range waits for the reader. */
static void unreserve(char *at, size_t bytes)
{
	if (at == NULL)
		return;
	(void)real_leave(at, bytes, false);
	iswf_real()->munmap(at, bytes);
}

int iswf_memory_init(uint32_t blocks)
{
	size_t arena_bytes = (size_t)blocks * ISWF_BLOCK_BYTES;
	size_t shadow_bytes = (size_t)ISWF_SHADOW_SLOTS * ISWF_BLOCK_BYTES;
	size_t cradle_bytes = (size_t)ISWF_CRADLE_SLOTS * ISWF_BLOCK_BYTES;
	char *arena = reserve(arena_bytes), *shadow = reserve(shadow_bytes);
	char *cradle = reserve(cradle_bytes);
	void *table = iswf_real()->mmap(NULL, blocks * sizeof(*A->blocks), PROT_READ | PROT_WRITE,
					MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (arena == NULL || shadow == NULL || cradle == NULL || table == MAP_FAILED ||
	    watch(arena, arena_bytes) != 0 || watch(shadow, shadow_bytes) != 0) {
		unreserve(arena, arena_bytes);
		unreserve(shadow, shadow_bytes);
		unreserve(cradle, cradle_bytes);
		if (table != MAP_FAILED)
			iswf_real()->munmap(table, blocks * sizeof(*A->blocks));
		return -ENOMEM;
	}
	A->shadow = shadow;
	A->cradle = cradle;
	A->blocks = table;
	for (uint32_t i = 0; i < ISWF_SHADOW_SLOTS; i++)
		A->shadow_free[A->shadow_free_count++] = ISWF_SHADOW_SLOTS - 1 - i;
	for (uint32_t i = 0; i < ISWF_CRADLE_SLOTS; i++)
		A->cradle_free[A->cradle_free_count++] = i;
	A->blocks_count = blocks;
	A->arena = arena;
	return 0;
}

void iswf_memory_close(void)
{
	iswf_close_own(uffd);
	uffd = -1;
}

/* ------------------------------------------------------------------- messages */

struct message {
	uint8_t event;
	char *from, *end, *to;
};

static struct message messages[MESSAGES];
static atomic_uint written, taken; /* by the reader; under take_lock */
static atomic_uint available;      /* a futex: `written`, for who sleeps */
static pthread_mutex_t take_lock = PTHREAD_MUTEX_INITIALIZER;

static void hand_on(const struct message *message)
{
	unsigned int at = atomic_load_explicit(&written, memory_order_relaxed);

	/* Threads and their unread events: never so many. */
	while (at - atomic_load_explicit(&taken, memory_order_acquire) >= MESSAGES)
		pause_ns(AGAIN_NS);
	messages[at % MESSAGES] = *message;
	atomic_store_explicit(&written, at + 1, memory_order_release);
	atomic_store(&available, at + 1);
	futex_wake(&available);
}

/* Of a discard over several mappings there is an event for each. */
static bool is_own(uintptr_t from, uintptr_t end)
{
	unsigned int pages = (unsigned int)((end - from) / ISWF_PAGE_BYTES);

	if (atomic_load(&own_unseen) < pages || from < atomic_load(&own_from) ||
	    end > atomic_load(&own_end))
		return false;
	if (atomic_fetch_sub(&own_unseen, pages) == pages)
		futex_wake(&own_unseen);
	return true;
}

static void hear(const struct uffd_msg *msg)
{
	struct message message = {.event = msg->event};

	switch (msg->event) {
	case UFFD_EVENT_PAGEFAULT:
		message.from = (char *)(uintptr_t)(msg->arg.pagefault.address &
						   ~(__u64)(ISWF_PAGE_BYTES - 1));
		break;
	case UFFD_EVENT_REMOVE:
	case UFFD_EVENT_UNMAP:
		if (msg->event == UFFD_EVENT_REMOVE &&
		    is_own((uintptr_t)msg->arg.remove.start, (uintptr_t)msg->arg.remove.end))
			return;
		message.from = (char *)(uintptr_t)msg->arg.remove.start;
		message.end = (char *)(uintptr_t)msg->arg.remove.end;
		break;
	case UFFD_EVENT_REMAP:
		message.from = (char *)(uintptr_t)msg->arg.remap.from;
		message.end = message.from + msg->arg.remap.len;
		message.to = (char *)(uintptr_t)msg->arg.remap.to;
		break;
	default:
		return;
	}
	hand_on(&message);
}

void *iswf_reader_main(void *arg)
{
	struct uffd_msg msgs[BATCH];

	(void)arg;
	for (;;) {
		ssize_t got = read(uffd, msgs, sizeof(msgs));

		for (ssize_t i = 0; i * (ssize_t)sizeof(*msgs) < got; i++)
			hear(&msgs[i]);
	}
	return NULL;
}

/* The lock is held over an event, so that faults that came after it are served after it. */
void iswf_serve_one(void)
{
	struct message message;
	unsigned int at;

	for (;;) {
		pthread_mutex_lock(&take_lock);
		at = atomic_load_explicit(&taken, memory_order_relaxed);
		if (at != atomic_load_explicit(&written, memory_order_acquire))
			break;
		pthread_mutex_unlock(&take_lock);
		futex_wait(&available, at);
	}
	message = messages[at % MESSAGES];
	atomic_store_explicit(&taken, at + 1, memory_order_release);
	if (message.event == UFFD_EVENT_PAGEFAULT) {
		pthread_mutex_unlock(&take_lock);
		iswf_fault(message.from);
		return;
	}
	if (iswf_is_ours(message.from) && iswf_is_ours(message.end - 1))
		iswf_removed(message.from, message.end, message.event != UFFD_EVENT_REMOVE,
			     message.to);
	pthread_mutex_unlock(&take_lock);
}
