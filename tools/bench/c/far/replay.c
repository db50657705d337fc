/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plays a trace (record.c) to the agent's own handlers of blocks, over a kernel and a device that
 * only keep books, and to rivals: a fixed grain, least recently used, and Belady's optimum, which
 * knows the future. Prints what each of them brought back, as one line of JSON.
 *
 *     isw-bench-far-replay TRACE PERCENT agent|lru|optimum|fixed:PAGES ...
 *
 * The budget is PERCENT of the program's peak.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "far/blocks.h"
#include "far/real.h"
#include "trace.h"

#define FAULTS_MAX 100000u /* of one page */
#define WAIT_NS    5000000u
#define NEVER      UINT32_MAX
#define BUDGET_MIN 8u /* blocks: the agent keeps some of them free */

#define A (&iswf_agent)

struct tally {
	uint64_t fetches, whole, pages, pages_back;
};

static struct {
	struct record *records;
	uint32_t count, blocks;
	uint32_t part_pages; /* what the recorder has seen as one */
} trace;

static _Noreturn void fail(const char *what)
{
	fprintf(stderr, "isw-bench-far-replay: %s\n", what);
	exit(1);
}

static void *zeroed(size_t count, size_t bytes)
{
	void *at = calloc(count, bytes);

	if (at == NULL)
		fail("no memory");
	return at;
}

static enum kind kind_of(const struct record *record)
{
	return (enum kind)(record->kind_first >> KIND_SHIFT);
}

static uint32_t first_of(const struct record *record)
{
	return record->kind_first & FIRST_MASK;
}

/* Whether the program has given the pages up, or the kernel has them. */
static bool is_gone(enum kind kind)
{
	return kind == FREED || kind == DEAD || kind == ZEROS || kind == LEFT;
}

static void read_trace(const char *path)
{
	FILE *file = fopen(path, "rb");
	long bytes;

	if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (bytes = ftell(file)) <= 0)
		fail("there is no trace");
	rewind(file);
	trace.count = (uint32_t)((size_t)bytes / sizeof(*trace.records));
	trace.records = zeroed(trace.count, sizeof(*trace.records));
	if (fread(trace.records, sizeof(*trace.records), trace.count, file) != trace.count)
		fail("the trace cannot be read");
	fclose(file);
	if (trace.count == 0 || kind_of(&trace.records[0]) != PART_SIZE)
		fail("the trace does not say how large its parts are");
	trace.part_pages = trace.records[0].pages;
	if (trace.part_pages == 0 || ISWF_BLOCK_PAGES % trace.part_pages != 0)
		fail("parts of that size do not fill a block");
	for (uint32_t i = 0; i < trace.count; i++) {
		uint32_t end = first_of(&trace.records[i]) + trace.records[i].pages;

		if (kind_of(&trace.records[i]) != WINDOW && end > trace.blocks * ISWF_BLOCK_PAGES)
			trace.blocks = (end + ISWF_BLOCK_PAGES - 1) / ISWF_BLOCK_PAGES;
	}
}

/* --------------------------------------------------------- the agent's kernel and device */

static struct {
	uint64_t now_ns;
	bool *huge, *table; /* by block: there is a huge page; a table of single pages */
	bool shadow_huge[ISWF_SHADOW_SLOTS], shadow_table[ISWF_SHADOW_SLOTS];
	uint32_t owner[ISWF_SHADOW_SLOTS]; /* the block whose bytes are in the slot */
	uint32_t asked;                    /* the block of the last read */
	bool *written;                     /* by page: it is not zeros */
	uint64_t digests;
} world;

uint64_t iswf_now_ns(void)
{
	return world.now_ns += 100;
}

/* The linker redirects the agent's waits for room to this function: nobody else makes room. */
int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
				  const struct timespec *until);

int __wrap_pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *lock,
				  const struct timespec *until)
{
	(void)cond, (void)until;
	world.now_ns += WAIT_NS;
	pthread_mutex_unlock(lock);
	(void)iswf_work_once();
	pthread_mutex_lock(lock);
	return ETIMEDOUT;
}

const struct iswf_ops iswf_real_ops;

const struct iswf_real *iswf_real(void)
{
	static const struct iswf_real real = {
		.mmap = mmap,
		.munmap = munmap,
		.madvise = madvise,
	};

	return &real;
}

static uint32_t slot_of(const char *at)
{
	return (uint32_t)((at - A->shadow) / ISWF_BLOCK_BYTES);
}

static uint32_t block_of(const char *at)
{
	return (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
}

/* NULL for the cradle. */
static bool *huge_at(const char *at)
{
	return iswf_is_ours(at)     ? &world.huge[block_of(at)]
	       : iswf_is_shadow(at) ? &world.shadow_huge[slot_of(at)]
				    : NULL;
}

static bool *table_at(const char *at)
{
	static bool none;

	none = false;
	return iswf_is_ours(at)     ? &world.table[block_of(at)]
	       : iswf_is_shadow(at) ? &world.shadow_table[slot_of(at)]
				    : &none;
}

static bool is_huge(const char *at)
{
	return huge_at(at) == NULL || *huge_at(at);
}

static int move(char *to, char *from, size_t bytes, size_t *done_out)
{
	bool whole = bytes == ISWF_BLOCK_BYTES && is_huge(from) && !*table_at(to);

	if (!whole)
		*table_at(to) = *table_at(from) = true;
	if (huge_at(from) != NULL)
		*huge_at(from) = false;
	*huge_at(to) = whole;
	if (iswf_is_shadow(to)) /* from the cradle: read-ahead */
		world.owner[slot_of(to)] = iswf_is_ours(from) ? block_of(from) : world.asked;
	*done_out = bytes;
	return 0;
}

static int copy(char *to, const char *from, size_t bytes, bool moved, size_t *done_out)
{
	(void)from, (void)moved;
	world.table[block_of(to)] = true;
	world.huge[block_of(to)] = false;
	*done_out = bytes;
	return 0;
}

static int discard(char *at, size_t bytes, bool is_watched)
{
	(void)is_watched;
	*table_at(at) = bytes < ISWF_BLOCK_BYTES;
	*huge_at(at) = false;
	return 0;
}

static bool untable(char *at)
{
	*table_at(at) = false;
	return true;
}

static bool is_zeros(const char *page)
{
	uint32_t slot = slot_of(page);
	size_t at = (size_t)(page - A->shadow) % ISWF_BLOCK_BYTES / ISWF_PAGE_BYTES;

	return !world.written[world.owner[slot] * ISWF_BLOCK_PAGES + at];
}

/* Every page counts as changed when it leaves. */
static struct iswf_digest digest(const char *page)
{
	(void)page;
	return (struct iswf_digest){.low = ++world.digests};
}

static int ask(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
	       int (*take)(void *ctx, const char *from), void *ctx)
{
	static const char arrived[ISWF_BLOCK_BYTES];

	(void)first, (void)pages, (void)bytes;
	if (op != ISWF_READ)
		return 0;
	world.asked = block;
	return take(ctx, arrived);
}

/* The page is there: the fault was served meanwhile. */
static int zero(char *page)
{
	(void)page;
	return -EEXIST;
}

static int poison(char *page, bool moved)
{
	(void)page, (void)moved;
	return 0;
}

static void ignore_range(char *at, size_t bytes)
{
	(void)at, (void)bytes;
}

static int renew(char *slot)
{
	(void)slot;
	return 0;
}

static int unmap(char *at, size_t bytes)
{
	return discard(at, bytes, false);
}

static int advise(char *at, size_t bytes, int advice)
{
	(void)at, (void)bytes, (void)advice;
	return 0;
}

static int leave(char *at, size_t bytes, bool children)
{
	(void)at, (void)bytes, (void)children;
	return 0;
}

/* So far memory never pauses: what the kernel would swap is not counted here. */
static uint64_t no_swap(void)
{
	return 0;
}

static void pause_by_clock(uint64_t ns)
{
	world.now_ns += ns;
}

static const struct iswf_ops ops = {
	.move = move,
	.copy = copy,
	.poison = poison,
	.zero = zero,
	.wake = ignore_range,
	.discard = discard,
	.renew = renew,
	.is_huge = is_huge,
	.untable = untable,
	.fill_holes = ignore_range,
	.is_zeros = is_zeros,
	.digest = digest,
	.unmap = unmap,
	.advise = advise,
	.leave = leave,
	.pause = pause_by_clock,
	.free_swap_pages = no_swap,
	.ask = ask,
};

/* ------------------------------------------------------------------- the agent */

static char *reserve(size_t blocks, int protection)
{
	char *at = mmap(NULL, (blocks + 1) * ISWF_BLOCK_BYTES, protection,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		fail("no addresses");
	return at + (ISWF_BLOCK_BYTES - (uintptr_t)at % ISWF_BLOCK_BYTES) % ISWF_BLOCK_BYTES;
}

static void begin_agent(uint32_t budget_blocks)
{
	A->ops = &ops;
	A->arena = reserve(trace.blocks, PROT_NONE);
	A->shadow = reserve(ISWF_SHADOW_SLOTS, PROT_NONE);
	A->cradle = reserve(ISWF_CRADLE_SLOTS, PROT_READ | PROT_WRITE);
	A->digests = (void *)reserve(
		trace.blocks * ISWF_BLOCK_PAGES * sizeof(*A->digests) / ISWF_BLOCK_BYTES + 1,
		PROT_READ | PROT_WRITE);
	A->blocks = zeroed(trace.blocks, sizeof(*A->blocks));
	A->blocks_count = A->blocks_used = trace.blocks;
	A->budget_pages = (int64_t)budget_blocks * ISWF_BLOCK_PAGES;
	A->watched = true;
	A->tables_go = true;
	for (uint32_t i = ISWF_SHADOW_SLOTS; i-- > 0;)
		A->shadow_free[A->shadow_free_count++] = i;
	for (uint32_t i = ISWF_CRADLE_SLOTS; i-- > 0;)
		A->cradle_free[A->cradle_free_count++] = i;
	world.huge = zeroed(trace.blocks, sizeof(*world.huge));
	world.table = zeroed(trace.blocks, sizeof(*world.table));
	world.written = zeroed((size_t)trace.blocks * ISWF_BLOCK_PAGES, sizeof(*world.written));
	iswf_clocks_init();
}

/* What nothing has is zeros. */
static void forget_nowhere(const struct iswf_block *b, bool *written)
{
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		if (!iswf_has(&b->home, page) && !iswf_has(&b->aside, page) &&
		    !iswf_has(&b->far, page))
			written[page] = false;
}

static void touch_page(uint32_t block, uint32_t page)
{
	struct iswf_block *b = &A->blocks[block];
	bool *written = &world.written[block * ISWF_BLOCK_PAGES];

	for (uint32_t i = 0; !iswf_has(&b->home, page); i++) {
		if (i == FAULTS_MAX)
			fail("a page does not come home");
		forget_nowhere(b, written);
		iswf_fault(iswf_at(block) + (size_t)page * ISWF_PAGE_BYTES);
		while (iswf_work_once())
			;
	}
	written[page] = true;
}

static void play_take(uint32_t block, uint32_t first, uint32_t end, bool is_mapping)
{
	struct iswf_mask pages = iswf_mask_range(first, end);

	iswf_mask_add(&A->blocks[block].live, &pages);
	A->blocks[block].mapped |= is_mapping;
	iswf_sort(block);
}

static void play_free(uint32_t block, uint32_t first, uint32_t end, enum iswf_fate fate)
{
	for (uint32_t page = first; page < end && fate != ISWF_FREED; page++)
		world.written[block * ISWF_BLOCK_PAGES + page] = false;
	pthread_mutex_lock(&A->lock);
	(void)iswf_discard(block, first, end, fate);
	pthread_mutex_unlock(&A->lock);
}

static void play_block(enum kind kind, uint32_t block, uint32_t first, uint32_t end)
{
	switch (kind) {
	case TOUCH:
		for (uint32_t page = first; page < end; page++)
			touch_page(block, page);
		break;
	case TAKEN:
	case MAPPED:
		play_take(block, first, end, kind == MAPPED);
		break;
	case FREED:
		play_free(block, first, end, ISWF_FREED);
		break;
	case DEAD:
	case LEFT:
		play_free(block, first, end, ISWF_DEAD);
		break;
	case ZEROS:
		play_free(block, first, end, ISWF_ZEROS);
		break;
	default:
		break;
	}
}

static void play_window(uint32_t ms)
{
	uint64_t ns = (uint64_t)ms * 1000000u;

	if (ns > world.now_ns)
		world.now_ns = ns;
	while (iswf_work_once())
		;
}

static void play_record(const struct record *record)
{
	uint32_t page = first_of(record), end = page + record->pages;

	if (kind_of(record) == WINDOW) {
		play_window(record->pages);
		return;
	}
	while (page < end) {
		uint32_t block = page / ISWF_BLOCK_PAGES, base = block * ISWF_BLOCK_PAGES;
		uint32_t stop = end - base < ISWF_BLOCK_PAGES ? end - base : ISWF_BLOCK_PAGES;

		play_block(kind_of(record), block, page - base, stop);
		page = base + stop;
	}
}

static struct tally play_agent(uint32_t budget_blocks)
{
	if (A->blocks != NULL)
		fail("the agent plays once");
	begin_agent(budget_blocks);
	for (uint32_t i = 0; i < trace.count; i++)
		play_record(&trace.records[i]);
	return (struct tally){
		.fetches = A->count.fetches,
		.whole = A->count.fetches - A->count.small_fetches,
		.pages = A->count.pages_in,
		.pages_back = A->count.pages_back,
	};
}

/* ------------------------------------------------------------------- rivals */

/* Of a page, or of a part: nobody has it, it is home, it is far. */
enum state { NOWHERE, HOME, FAR };

/* A rival whose blocks leave whole, first in, first out. */
struct fixed {
	uint32_t grain; /* pages that a fault brings */
	uint8_t *state; /* of pages */
	uint32_t *home; /* by block: pages at home */
	bool *queued;
	uint32_t *next, head, tail;
	int64_t room; /* pages */
	struct tally tally;
};

static void fixed_queue(struct fixed *f, uint32_t block)
{
	if (f->queued[block])
		return;
	f->queued[block] = true;
	f->next[block] = NEVER;
	if (f->head == NEVER)
		f->head = block;
	else
		f->next[f->tail] = block;
	f->tail = block;
}

/* The first block leaves, unless it is `kept`. */
static void fixed_leave(struct fixed *f, uint32_t kept)
{
	uint32_t block = f->head, base = block * ISWF_BLOCK_PAGES;

	f->head = f->next[block];
	f->queued[block] = false;
	if (block == kept) {
		fixed_queue(f, block);
		return;
	}
	for (uint32_t page = base; page < base + ISWF_BLOCK_PAGES; page++)
		if (f->state[page] == HOME)
			f->state[page] = FAR;
	f->room += f->home[block];
	f->home[block] = 0;
}

static void fixed_add(struct fixed *f, uint32_t page)
{
	f->tally.pages += f->state[page] == FAR;
	f->state[page] = HOME;
	f->home[page / ISWF_BLOCK_PAGES]++;
	f->room--;
}

/* What is far of the grain comes; zeros cost nothing, and come one by one. */
static void fixed_touch(struct fixed *f, uint32_t page)
{
	uint32_t first = page / f->grain * f->grain, block = page / ISWF_BLOCK_PAGES;
	bool far = f->state[page] == FAR;

	if (f->state[page] == HOME)
		return;
	while (f->room < (far ? f->grain : 1))
		fixed_leave(f, block);
	fixed_queue(f, block);
	if (!far) {
		fixed_add(f, page);
		return;
	}
	f->tally.fetches++;
	f->tally.whole += f->grain == ISWF_BLOCK_PAGES;
	for (uint32_t each = first; each < first + f->grain; each++)
		if (f->state[each] == FAR)
			fixed_add(f, each);
}

static void fixed_forget(struct fixed *f, uint32_t page)
{
	if (f->state[page] == HOME) {
		f->room++;
		f->home[page / ISWF_BLOCK_PAGES]--;
	}
	f->state[page] = NOWHERE;
}

static struct tally play_fixed(uint32_t budget_blocks, uint32_t grain)
{
	struct fixed f = {
		.grain = grain,
		.state = zeroed((size_t)trace.blocks * ISWF_BLOCK_PAGES, 1),
		.home = zeroed(trace.blocks, sizeof(*f.home)),
		.queued = zeroed(trace.blocks, sizeof(*f.queued)),
		.next = zeroed(trace.blocks, sizeof(*f.next)),
		.head = NEVER,
		.room = (int64_t)budget_blocks * ISWF_BLOCK_PAGES,
	};

	for (uint32_t i = 0; i < trace.count; i++) {
		const struct record *record = &trace.records[i];
		uint32_t first = first_of(record), end = first + record->pages;

		for (uint32_t page = first; page < end && kind_of(record) == TOUCH; page++)
			fixed_touch(&f, page);
		for (uint32_t page = first; page < end && is_gone(kind_of(record)); page++)
			fixed_forget(&f, page);
	}
	free(f.state);
	free(f.home);
	free(f.queued);
	free(f.next);
	return f.tally;
}

/* ------------------------------------------------------- single parts, by the order of uses */

/* gone: the program frees the last page of the part. */
struct use {
	uint32_t part, next; /* the next use of the same part, or NEVER */
	bool gone;
};

struct uses {
	struct use *list;
	uint32_t count, room, parts;
	uint32_t *last;  /* by part: its last use + 1; 0: it has none, or is gone */
	uint32_t *pages; /* by part: pages that the program has touched and not freed */
	bool *touched;   /* by page: it is one of these */
};

static void add_use(struct uses *uses, uint32_t part, bool gone)
{
	if (uses->count == uses->room) {
		uses->room = uses->room == 0 ? 1u << 20 : uses->room * 2;
		uses->list = realloc(uses->list, uses->room * sizeof(*uses->list));
		if (uses->list == NULL)
			fail("no memory");
	}
	if (uses->last[part] != 0 && !gone)
		uses->list[uses->last[part] - 1].next = uses->count;
	uses->list[uses->count++] = (struct use){part, NEVER, gone};
	uses->last[part] = gone ? 0 : uses->count;
}

static void use_page(struct uses *uses, uint32_t page, bool gone)
{
	uint32_t part = page / trace.part_pages;

	if (!gone && page % trace.part_pages == 0)
		add_use(uses, part, false);
	if (uses->touched[page] != gone)
		return;
	uses->touched[page] = !gone;
	uses->pages[part] += gone ? -1u : 1;
	if (uses->pages[part] == 0)
		add_use(uses, part, true);
}

/* Touches are of whole parts. */
static struct uses list_uses(void)
{
	uint32_t pages = trace.blocks * ISWF_BLOCK_PAGES, parts = pages / trace.part_pages;
	struct uses uses = {
		.parts = parts,
		.last = zeroed(parts, sizeof(*uses.last)),
		.pages = zeroed(parts, sizeof(*uses.pages)),
		.touched = zeroed(pages, sizeof(*uses.touched)),
	};

	for (uint32_t i = 0; i < trace.count; i++) {
		const struct record *record = &trace.records[i];
		uint32_t first = first_of(record), end = first + record->pages;
		bool gone = is_gone(kind_of(record));

		for (uint32_t page = first; page < end && (gone || kind_of(record) == TOUCH);
		     page++)
			use_page(&uses, page, gone);
	}
	free(uses.last);
	free(uses.pages);
	free(uses.touched);
	return uses;
}

/* In parts. */
static uint32_t peak_of(const struct uses *uses)
{
	bool *in_use = zeroed(uses->parts, sizeof(*in_use));
	uint32_t count = 0, peak = 0;

	for (uint32_t i = 0; i < uses->count; i++) {
		const struct use *use = &uses->list[i];

		if (in_use[use->part] == use->gone)
			count += use->gone ? -1u : 1;
		in_use[use->part] = !use->gone;
		if (count > peak)
			peak = count;
	}
	free(in_use);
	return peak;
}

/* The part with the largest key is first. Entries whose key is not the part's stay until then. */
struct entry {
	uint32_t key, part;
};

struct heap {
	struct entry *entries;
	uint32_t count;
};

static void heap_push(struct heap *heap, struct entry entry)
{
	struct entry *entries = heap->entries;
	uint32_t at = heap->count++;

	for (; at > 0 && entries[(at - 1) / 2].key < entry.key; at = (at - 1) / 2)
		entries[at] = entries[(at - 1) / 2];
	entries[at] = entry;
}

static struct entry heap_pop(struct heap *heap)
{
	struct entry *entries = heap->entries, top = entries[0], last = entries[--heap->count];
	uint32_t at = 0, child;

	while ((child = 2 * at + 1) < heap->count) {
		if (child + 1 < heap->count && entries[child + 1].key > entries[child].key)
			child++;
		if (entries[child].key <= last.key)
			break;
		entries[at] = entries[child];
		at = child;
	}
	entries[at] = last;
	return top;
}

/* optimum: the part that is used again last leaves first; else the one that was used first. */
static struct tally play_parts(const struct uses *uses, uint32_t budget_blocks, bool optimum)
{
	uint32_t room = budget_blocks * ISWF_BLOCK_PAGES / trace.part_pages, home = 0;
	uint32_t *key = zeroed(uses->parts, sizeof(*key));
	uint8_t *state = zeroed(uses->parts, 1);
	struct heap heap = {zeroed(uses->count + 1, sizeof(struct entry)), 0};
	struct tally tally = {0};

	for (uint32_t i = 0; i < uses->count; i++) {
		uint32_t part = uses->list[i].part;

		if (uses->list[i].gone) {
			home -= state[part] == HOME;
			state[part] = NOWHERE;
			continue;
		}
		tally.fetches += state[part] == FAR;
		tally.pages += state[part] == FAR ? trace.part_pages : 0;
		home += state[part] != HOME;
		state[part] = HOME;
		key[part] = optimum ? uses->list[i].next : NEVER - i;
		while (home > room) {
			struct entry victim = heap_pop(&heap);

			if (state[victim.part] != HOME || key[victim.part] != victim.key)
				continue;
			state[victim.part] = FAR;
			home--;
		}
		heap_push(&heap, (struct entry){key[part], part});
	}
	free(heap.entries);
	free(key);
	free(state);
	return tally;
}

static struct tally play(const struct uses *uses, uint32_t budget_blocks, const char *policy)
{
	uint32_t grain;

	if (strcmp(policy, "agent") == 0)
		return play_agent(budget_blocks);
	if (strcmp(policy, "lru") == 0 || strcmp(policy, "optimum") == 0)
		return play_parts(uses, budget_blocks, policy[0] == 'o');
	if (sscanf(policy, "fixed:%u", &grain) == 1 && grain > 0 && ISWF_BLOCK_PAGES % grain == 0)
		return play_fixed(budget_blocks, grain);
	fail("no such policy");
}

int main(int argc, char **argv)
{
	uint32_t percent = argc > 3 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0, blocks;
	struct uses uses;

	if (percent == 0)
		fail("usage: TRACE PERCENT POLICY ...");
	read_trace(argv[1]);
	uses = list_uses();
	blocks = (uint32_t)((uint64_t)peak_of(&uses) * trace.part_pages * percent / 100 /
			    ISWF_BLOCK_PAGES);
	if (blocks < BUDGET_MIN)
		blocks = BUDGET_MIN;
	printf("{\"budget_blocks\": %u", blocks);
	for (int i = 3; i < argc; i++) {
		struct tally tally = play(&uses, blocks, argv[i]);

		printf(", \"%s\": {\"fetches\": %llu, \"whole\": %llu, \"pages\": %llu, "
		       "\"pages_back\": %llu}",
		       argv[i], (unsigned long long)tally.fetches, (unsigned long long)tally.whole,
		       (unsigned long long)tally.pages, (unsigned long long)tally.pages_back);
	}
	printf("}\n");
	free(uses.list);
	return 0;
}
