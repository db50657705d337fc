/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernel does for the agent: the ranges and the operations on them. The kernel refuses
 * operations with EAGAIN while an event is unread; they are tried again a moment later, by threads
 * that hold no lock (F6).
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/memory.h"
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
#ifndef PAGEMAP_SCAN /* Linux 6.7 */
struct page_region {
	__u64 start, end, categories;
};
struct pm_scan_arg {
	__u64 size, flags, start, end, walk_end, vec, vec_len, max_pages;
	__u64 category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN    _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)
#define PAGE_IS_HUGE    (1 << 6)
#endif

/* The reader waits for an operation under way: not for long. */
#define COPY_BYTES_MAX (128u << 10)
#define BORDER_BYTES   ((size_t)ISWF_BORDER_BLOCKS * ISWF_BLOCK_BYTES)
/* Of one scan, on the stack of a thread of the program's. */
#define SCAN_REGIONS 32u

#define A (&iswf_agent)

/* An entry of /proc/PID/pagemap: the page is in memory; it is in swap, or on its way elsewhere. */
#define PAGEMAP_THERE (3ull << 62)

int iswf_uffd = -1;
static int pagemap = -1;

void iswf_pause(uint64_t ns)
{
	const struct timespec time = {.tv_nsec = (long)ns};

	nanosleep(&time, NULL);
}

/* ------------------------------------------------------------------- operations */

/* An ioctl over a range, and the parts of its argument. */
struct operation {
	unsigned long request;
	void *arg;
	__u64 *to, *from, *bytes; /* from: NULL if it has none */
	__s64 *came;
	size_t most;  /* bytes in one go */
	bool is_free; /* not of the arena: it need not wait for events to be served */
};

/* The kernel's own EAGAIN: an event waits to be read, which the reader does. */
static int operate_once(const struct operation *o)
{
	int code;

	do {
		*o->came = 0;
		if (!o->is_free && !iswf_enter())
			return -EAGAIN;
		code = ioctl(iswf_uffd, o->request, o->arg) == 0 ? 0 : -errno;
		if (!o->is_free)
			iswf_leave();
		if (code == -EAGAIN && *o->came <= 0)
			iswf_pause(ISWF_AGAIN_NS);
	} while (code == -EAGAIN && *o->came <= 0);
	return code;
}

/* Does `bytes`, or as much as it can from the front. */
static int operate(const struct operation *o, size_t bytes, size_t *done_out)
{
	size_t done = 0;
	int code = 0;

	while (done < bytes && code == 0) {
		size_t step = 0;

		*o->bytes = bytes - done < o->most ? bytes - done : o->most;
		code = operate_once(o);
		if (code == 0)
			step = *o->bytes;
		else if (*o->came > 0)
			step = (size_t)*o->came;
		if (step > 0)
			code = 0;
		done += step;
		*o->to += step;
		if (o->from != NULL)
			*o->from += step;
	}
	*done_out = done;
	return code;
}

/*
 * Where a page that is to be moved is just being migrated (compaction), kernels since 6.17 move it,
 * and what follows, a moment later, and do not count that: they find those pages at `to`, and say
 * EEXIST. The pages from `from` on that are no longer there, in bytes.
 */
static size_t moved_uncounted(const char *from, size_t bytes)
{
	uint64_t entries[ISWF_BLOCK_PAGES];
	size_t pages = bytes / ISWF_PAGE_BYTES, gone = 0;
	off_t at = (off_t)((uintptr_t)from / ISWF_PAGE_BYTES * sizeof(entries[0]));

	if (pread(pagemap, entries, pages * sizeof(entries[0]), at) !=
	    (ssize_t)(pages * sizeof(entries[0])))
		return 0;
	while (gone < pages && (entries[gone] & PAGEMAP_THERE) == 0)
		gone++;
	return gone * ISWF_PAGE_BYTES;
}

/* At most a block. */
static int real_move(char *to, char *from, size_t bytes, size_t *done_out)
{
	struct uffdio_move move = {
		.dst = (uintptr_t)to,
		.src = (uintptr_t)from,
		.mode = UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES,
	};
	const struct operation operation = {
		.request = UFFDIO_MOVE,
		.arg = &move,
		.to = &move.dst,
		.from = &move.src,
		.bytes = &move.len,
		.came = &move.move,
		.most = ISWF_BLOCK_BYTES,
	};
	int code = operate(&operation, bytes, done_out);
	size_t more;

	while (code == -EEXIST &&
	       (more = moved_uncounted(from + *done_out, bytes - *done_out)) != 0) {
		move.dst += more;
		move.src += more;
		*done_out += more;
		code = operate(&operation, bytes - *done_out, &more);
		*done_out += more;
	}
	return code;
}

static void real_wake(char *at, size_t bytes)
{
	struct uffdio_range range = {(uintptr_t)at, bytes};

	(void)ioctl(iswf_uffd, UFFDIO_WAKE, &range);
}

static int real_copy(char *to, const char *from, size_t bytes, bool moved, size_t *done_out)
{
	struct uffdio_copy copy = {
		.dst = (uintptr_t)to,
		.src = (uintptr_t)from,
	};
	struct operation operation = {
		.request = UFFDIO_COPY,
		.arg = &copy,
		.to = &copy.dst,
		.from = &copy.src,
		.bytes = &copy.len,
		.came = &copy.copy,
		.most = COPY_BYTES_MAX,
		.is_free = moved,
	};
	size_t more;
	int code = operate(&operation, bytes, done_out);

	if (code != -ENOENT || bytes - *done_out <= ISWF_PAGE_BYTES)
		return code;
	/* Over more than one mapping the kernel copies nothing: then page by page. */
	operation.most = ISWF_PAGE_BYTES;
	code = operate(&operation, bytes - *done_out, &more);
	*done_out += more;
	return code;
}

static int zero_page(char *page, bool is_free)
{
	struct uffdio_zeropage zero = {.range = {.start = (uintptr_t)page}};
	const struct operation operation = {
		.request = UFFDIO_ZEROPAGE,
		.arg = &zero,
		.to = &zero.range.start,
		.bytes = &zero.range.len,
		.came = &zero.zeropage,
		.most = ISWF_PAGE_BYTES,
		.is_free = is_free,
	};
	size_t done;

	return operate(&operation, ISWF_PAGE_BYTES, &done);
}

static int real_zero(char *page)
{
	return zero_page(page, !iswf_is_ours(page));
}

static int real_poison(char *page, bool moved)
{
	struct uffdio_poison poison = {.range = {.start = (uintptr_t)page}};
	const struct operation operation = {
		.request = UFFDIO_POISON,
		.arg = &poison,
		.to = &poison.range.start,
		.bytes = &poison.range.len,
		.came = &poison.updated,
		.most = ISWF_PAGE_BYTES,
		.is_free = moved,
	};
	size_t done;

	iswf_link_tell();
	return operate(&operation, ISWF_PAGE_BYTES, &done);
}

static uint64_t real_free_swap_pages(void)
{
	struct sysinfo info;

	return sysinfo(&info) != 0 ? 0 : (uint64_t)info.freeswap * info.mem_unit / ISWF_PAGE_BYTES;
}

static int advise(char *at, size_t bytes, int advice)
{
	return iswf_real()->madvise(at, bytes, advice) == 0 ? 0 : -errno;
}

/* The reader tells our own discards from the program's; one of ours is under way at a time. */
static int real_discard(char *at, size_t bytes, bool is_watched)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	int code;

	if (!is_watched)
		return advise(at, bytes, MADV_DONTNEED);
	pthread_mutex_lock(&lock);
	iswf_begin_discard(at, bytes);
	code = advise(at, bytes, MADV_DONTNEED);
	iswf_end_discard();
	pthread_mutex_unlock(&lock);
	return code;
}

/* Who claims the block alone uses its slot of the shadow, so what is there stays. */
static void real_fill_holes(char *at, size_t bytes)
{
	unsigned char in_memory[ISWF_BLOCK_PAGES];
	bool known = mincore(at, bytes, in_memory) == 0;

	for (size_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++)
		if (!known || !(in_memory[i] & 1)) /* else the kernel may have it in swap */
			(void)zero_page(at + i * ISWF_PAGE_BYTES, true);
}

/* A mapping of ours gets huge pages, and forked children do not get it. */
static void prepare(char *at, size_t bytes)
{
	(void)advise(at, bytes, MADV_HUGEPAGE);
	(void)advise(at, bytes, MADV_DONTFORK);
}

/* A page table that single pages have left keeps huge ones away; a new mapping has none. */
static int real_renew(char *slot)
{
	void *made =
		iswf_real()->mmap(slot, ISWF_BLOCK_BYTES, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);

	if (made == MAP_FAILED)
		return -errno;
	prepare(slot, ISWF_BLOCK_BYTES);
	return 0;
}

static bool real_is_huge(const char *at)
{
	struct page_region region;
	struct pm_scan_arg scan = {
		.size = sizeof(scan),
		.start = (uintptr_t)at,
		.end = (uintptr_t)at + ISWF_PAGE_BYTES,
		.vec = (uintptr_t)&region,
		.vec_len = 1,
		.category_mask = PAGE_IS_HUGE,
		.return_mask = PAGE_IS_HUGE,
	};

	return ioctl(pagemap, PAGEMAP_SCAN, &scan) != 0;
}

/* The block's pages of any of these kinds. False: the kernel does not tell. */
static bool scan_block(const char *at, uint64_t kinds, struct iswf_mask *found)
{
	struct page_region regions[SCAN_REGIONS];
	struct pm_scan_arg scan = {
		.size = sizeof(scan),
		.start = (uintptr_t)at,
		.end = (uintptr_t)at + ISWF_BLOCK_BYTES,
		.vec = (uintptr_t)regions,
		.vec_len = SCAN_REGIONS,
		.category_anyof_mask = kinds,
		.return_mask = kinds,
	};

	for (; scan.start < scan.end; scan.start = scan.walk_end) {
		int count = ioctl(pagemap, PAGEMAP_SCAN, &scan);

		if (count < 0)
			return false;
		for (int i = 0; i < count; i++) {
			uint64_t first = (regions[i].start - (uintptr_t)at) / ISWF_PAGE_BYTES;
			uint64_t end = (regions[i].end - (uintptr_t)at) / ISWF_PAGE_BYTES;
			struct iswf_mask run = iswf_mask_range((uint32_t)first, (uint32_t)end);

			iswf_mask_add(found, &run);
		}
	}
	return true;
}

uint32_t iswf_swapped_pages(const char *at)
{
	struct iswf_mask swapped = {{0}};

	return scan_block(at, PAGE_IS_SWAPPED, &swapped) ? iswf_mask_count(&swapped) : 0;
}

/* Where the kernel does not tell, all may be there (F4). */
static struct iswf_mask real_there(const char *at)
{
	struct iswf_mask there = {{0}};

	if (!scan_block(at, PAGE_IS_PRESENT | PAGE_IS_SWAPPED, &there))
		there = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	return there;
}

/*
 * Kernels since 6.14 may give up a table of pages with the last page, when they are told to forget
 * all of its range: where this one does, a huge page can be there afterwards.
 */
static bool gives_up_tables(char *slot)
{
	bool gives;

	if (advise(slot, ISWF_BLOCK_BYTES, MADV_NOHUGEPAGE) != 0)
		return false;
	*(volatile char *)slot = 0;
	(void)advise(slot, ISWF_BLOCK_BYTES, MADV_HUGEPAGE);
	(void)advise(slot, ISWF_BLOCK_BYTES, MADV_DONTNEED);
	*(volatile char *)slot = 0;
	gives = real_is_huge(slot);
	(void)advise(slot, ISWF_BLOCK_BYTES, MADV_DONTNEED);
	return gives;
}

/* Not while an event is unserved: something else may be there (F3). */
static bool real_untable(char *at)
{
	if (!A->tables_go || !iswf_enter())
		return false;
	iswf_leave();
	return real_discard(at, ISWF_BLOCK_BYTES, true) == 0;
}

static bool real_is_zeros(const char *page)
{
	uint64_t word;

	memcpy(&word, page, sizeof(word));
	return word == 0 && memcmp(page, page + sizeof(word), ISWF_PAGE_BYTES - sizeof(word)) == 0;
}

static int real_unmap(char *at, size_t bytes)
{
	return iswf_real()->munmap(at, bytes) == 0 ? 0 : -errno;
}

static int real_leave(char *at, size_t bytes, bool children)
{
	struct uffdio_range range = {(uintptr_t)at, bytes};
	int code = ioctl(iswf_uffd, UFFDIO_UNREGISTER, &range) == 0 ? 0 : -errno;
	int advised = children ? advise(at, bytes, MADV_DOFORK) : 0;

	return code != 0 ? code : advised;
}

static int real_watch(char *at, size_t bytes)
{
	struct uffdio_register range = {
		.range = {(uintptr_t)at, bytes},
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};

	/* Our own ioctl() takes it for another userfaultfd of the program's. */
	return iswf_real()->ioctl(iswf_uffd, UFFDIO_REGISTER, &range) == 0 ? 0 : -errno;
}

const struct iswf_ops iswf_real_ops = {
	.move = real_move,
	.copy = real_copy,
	.zero = real_zero,
	.poison = real_poison,
	.wake = real_wake,
	.discard = real_discard,
	.renew = real_renew,
	.is_huge = real_is_huge,
	.untable = real_untable,
	.fill_holes = real_fill_holes,
	.is_zeros = real_is_zeros,
	.digest = iswf_digest,
	.unmap = real_unmap,
	.advise = advise,
	.leave = real_leave,
	.watch = real_watch,
	.there = real_there,
	.pause = iswf_pause,
	.free_swap_pages = real_free_swap_pages,
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
		fd = ioctl(device_fd, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		fd = (int)iswf_real()->syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	iswf_uffd = iswf_own_fd(fd);
	if (iswf_uffd >= 0 && ioctl(iswf_uffd, UFFDIO_API, &api) != 0)
		return -errno;
	if (iswf_uffd < 0)
		return iswf_uffd;
	/* Not the main thread's: that may have ended. */
	pagemap = iswf_own_fd(open("/proc/thread-self/pagemap", O_RDONLY | O_CLOEXEC));
	return pagemap < 0 ? pagemap : iswf_uffd;
}

/* Addresses alone, from a border on. */
static char *reserve(size_t bytes)
{
	char *at = iswf_real()->mmap(NULL, bytes + BORDER_BYTES, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *aligned;

	if (at == MAP_FAILED)
		return NULL;
	aligned = (char *)(((uintptr_t)at + BORDER_BYTES - 1) & ~((uintptr_t)BORDER_BYTES - 1));
	if (aligned > at)
		iswf_real()->munmap(at, (size_t)(aligned - at));
	iswf_real()->munmap(aligned + bytes, (size_t)(at + BORDER_BYTES - aligned));
	prepare(aligned, bytes);
	return aligned;
}

/* Unregistered first: the munmap of a registered range waits for the reader. */
static void unreserve(char *at, size_t bytes)
{
	if (at == NULL)
		return;
	(void)real_leave(at, bytes, false);
	iswf_real()->munmap(at, bytes);
}

/* A table of the agent's own, used in few places at a time: a huge page of it would be waste. */
static void *make_table(size_t bytes)
{
	void *table = iswf_real()->mmap(NULL, bytes, PROT_READ | PROT_WRITE,
					MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (table == MAP_FAILED)
		return NULL;
	(void)advise(table, bytes, MADV_NOHUGEPAGE);
	return table;
}

static void end_table(void *table, size_t bytes)
{
	if (table != NULL)
		iswf_real()->munmap(table, bytes);
}

int iswf_memory_init(uint32_t blocks)
{
	size_t arena_bytes = (size_t)blocks * ISWF_BLOCK_BYTES;
	size_t shadow_bytes = (size_t)ISWF_SHADOW_SLOTS * ISWF_BLOCK_BYTES;
	size_t cradle_bytes = (size_t)ISWF_CRADLE_SLOTS * ISWF_BLOCK_BYTES;
	size_t blocks_bytes = blocks * sizeof(*A->blocks);
	size_t digests_bytes = (size_t)blocks * ISWF_BLOCK_PAGES * sizeof(*A->digests);
	/* First, so that they are not beside the arena: a program may write beyond its memory. */
	void *table = make_table(blocks_bytes), *digests = make_table(digests_bytes);
	char *arena = reserve(arena_bytes), *shadow = reserve(shadow_bytes + cradle_bytes);

	if (arena == NULL || shadow == NULL || table == NULL || digests == NULL ||
	    iswf_digest_init() != 0 || real_watch(arena, arena_bytes) != 0 ||
	    real_watch(shadow, shadow_bytes) != 0) {
		unreserve(arena, arena_bytes);
		unreserve(shadow, shadow_bytes + cradle_bytes);
		end_table(table, blocks_bytes);
		end_table(digests, digests_bytes);
		return -ENOMEM;
	}
	A->shadow = shadow;
	A->cradle = shadow + shadow_bytes;
	A->blocks = table;
	A->digests = digests;
	for (uint32_t i = 0; i < ISWF_SHADOW_SLOTS; i++)
		A->shadow_free[A->shadow_free_count++] = ISWF_SHADOW_SLOTS - 1 - i;
	for (uint32_t i = 0; i < ISWF_CRADLE_SLOTS; i++)
		A->cradle_free[A->cradle_free_count++] = i;
	atomic_store(&A->blocks_count, blocks);
	A->tables_go = gives_up_tables(A->cradle);
	/* What the kernel takes now it takes later, too. */
	A->watched = A->scarce || real_leave(arena, arena_bytes, false) != 0;
	A->arena = arena;
	return 0;
}

void iswf_memory_close(void)
{
	iswf_close_own(iswf_uffd);
	iswf_close_own(pagemap);
	iswf_uffd = pagemap = -1;
}
