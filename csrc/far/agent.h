/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent: a library preloaded into a job's programs. It takes large anonymous memory out of the
 * kernel's hands and moves it, by blocks of 2 MiB, to the device process, whose engine sends it to
 * donors. It needs libc alone, and costs a process nothing until that allocates something large.
 *
 * Memory. Large allocations come from one reserved range, the arena. It is larger than what the
 * device can hold: allocators reserve addresses that they never use. Once little is left of what
 * the job may use, it is registered with userfaultfd (watch.c). A block that leaves is first moved
 * to a slot of a second range, the shadow (no copy): a program that touches it then gets it back by
 * another move. From there it is sent. A block that comes back is made in a slot of a third range,
 * the cradle, as a huge page, and moved into the arena; single pages are copied in.
 *
 * A page of the arena is, as the block's masks say: home (the kernel has it in the arena, in memory
 * or in swap), aside (in the block's slot of the shadow), far (the device has it), or none of
 * these: then it is zeros and nothing has it. Until the arena is watched, what may be there is
 * home. `live` pages belong to an allocation; others are not sent, and may hold what an allocation
 * left there.
 *
 * Rules, beside those of the ring; each with its test (tests/c/test_far_*.c):
 *  F1  The device process has a duplicate of the userfaultfd, so no absent page becomes zeros when
 *      this process closes its own. The program cannot close our descriptors by close and its like.
 *  F2  A range is unregistered only when no page of it is aside or far.
 *  F3  Pages of the arena are moved or placed only by who has claimed their block, and only while
 *      no event waits to be read or served (EAGAIN: release the block, later). A range that
 *      something else changed is the kernel's from then on (`hole`): it is not touched or given
 *      again.
 *  F4  A fault on a page that is home: zeros are placed; if it was there after all, the thread is
 *      woken. It is woken alone only while an event is unserved: it faults again behind that.
 *  F5  A page whose bytes the device says are lost is poisoned: SIGBUS, never zeros. Any other
 *      refusal waits.
 *  F6  Who reads events and faults hands them on. It takes no lock of ours and changes nothing;
 *      it waits for an operation under way (F3), and none of these waits for it: no page that
 *      they read can be missing.
 *  F7  A program's thread takes the lock only with signals blocked. One whose stack is in the arena
 *      never does: a thread of ours does its errand.
 *  F8  The threads here take no lock of libc's, allocate nothing and touch no page of the arena.
 *  F9  They are libc's threads, started where the program itself calls an allocator.
 *  F12 What held a program's pages is given back to the kernel before it is used for others.
 *  F13 Whatever an operation answers, masks say afterwards where each page is: also of pages that
 *      the kernel has moved and not counted (memory.c).
 *  F15 A page that the device has, too, leaves unsent when it is as it left before, by a keyed
 *      hash, and the device confirms that it has it now.
 *  F16 The slot of the shadow is untouched from the first byte sent to the answer.
 *  F23 A device without room is no error: the block goes home, and eviction rests for a while.
 */
#ifndef ISWF_AGENT_H
#define ISWF_AGENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "far/ring.h"

#define ISWF_NONE          UINT32_MAX
#define ISWF_WORDS         (ISWF_BLOCK_PAGES / 64)
#define ISWF_SHADOW_SLOTS  1008u
#define ISWF_CRADLE_SLOTS  16u /* behind the shadow: together they are whole borders, too */
#define ISWF_AHEAD_MAX     2u
#define ISWF_EVICT_THREADS ISWF_WRITE_SLOTS
/* Ranges begin, and where no limit is in the way end, at borders of 1 GiB: the kernel moves page
 * tables of that size as a whole when others move their mappings, and none of ours is among them.
 */
#define ISWF_BORDER_BLOCKS 512u
#define ISWF_BLOCKS_MAX    (1u << 22) /* pages have numbers of 32 bits */

struct iswf_mask {
	uint64_t word[ISWF_WORDS];
};

/* Of a page's bytes, under this process's key. */
struct iswf_digest {
	uint64_t low, high;
};

/*
 * LOOPED: home, and one of more blocks that are read in turn than there is room for. FILLED: home,
 * since its first touch as one page of zeros, of which the program may use little.
 * FREED: home, and no page of it belongs to an allocation. DROP: it is nowhere but has a place.
 */
enum iswf_queue_name {
	ISWF_Q_NONE,
	ISWF_Q_HOME,
	ISWF_Q_LOOPED,
	ISWF_Q_FILLED,
	ISWF_Q_FREED,
	ISWF_Q_ASIDE,
	ISWF_Q_DROP,
	ISWF_QUEUES
};

/* What becomes of pages that are needed no more. */
enum iswf_fate {
	ISWF_ZEROS, /* the program may read them again */
	ISWF_DEAD,  /* they are not live, and what cannot be given again is unmapped */
	ISWF_FREED, /* the same, but what is home stays as it is, for the next allocation there */
};

enum iswf_request { ISWF_MALLOC, ISWF_CALLOC, ISWF_MAPPING };

/* All under the lock; the masks of a claimed block change by who has claimed it alone. */
struct iswf_block {
	struct iswf_mask home, aside, far, live;
	struct iswf_mask hole; /* the kernel's: unmapped, or something else is mapped there */
	/* Of home, aside and far: the device has it, and there is a digest of what it has. */
	struct iswf_mask known;
	uint32_t prev, next;
	uint32_t slot;               /* of the shadow, + 1; 0: none */
	uint16_t window, window_end; /* pages fetched last, and the page behind them */
	uint16_t rent;               /* of small fetches since it left as a whole */
	uint32_t fetched_at;         /* which of all fetches for faults was its last */
	uint32_t left_at, away; /* blocks that had left when it did; since, when it came back */
	uint32_t queued_ms;     /* when it was freed, filled or refused; may wrap */
	uint32_t whole_at;      /* which of all whole blocks it was that came; 0: none */
	uint8_t queue;          /* enum iswf_queue_name */
	uint8_t refusals;       /* moves out that failed, in a row */
	bool claimed;
	bool wanted; /* somebody faults in it and is to be woken at its release */
	bool fixed;  /* it stays home for good; what is freed of it is unmapped */
	bool unsure; /* pages may be there that no mask names: a discard we were told of */
	bool unseen; /* likewise: the arena is watched, and nobody has looked what is there */
	bool filled; /* as one page of zeros, and nobody has looked how many are zeros still */
	bool looked; /* somebody has: the program may read zeros, and need them again and again */
	bool tabled; /* single pages were there: their table keeps huge ones away */
	bool mapped; /* by the program, which may map something else there by a way unseen */
	bool paid;   /* bought by a part, at the first fault since it left */
	bool looped; /* it has come back twice after about as many others had left */
	bool placed; /* the device has a place for it */
	bool left;   /* no longer registered: the kernel fills it */
	bool ahead;  /* what is aside was brought before a fault: the device has it, too */
};

struct iswf_queue {
	uint32_t head, tail, count;
};

/*
 * What the kernel and the device do for the agent: real ones, or a test's. None is called with the
 * lock held; all but `ask` end soon. 0 or -errno; where an operation stops before its end,
 * *done_out says how many bytes it has done, from the front.
 *
 * -EAGAIN: an event waits to be served, so nothing of the arena may change (F3). -EEXIST: a page is
 * there already. -ENOENT: no mapping of ours is there.
 */
struct iswf_ops {
	int (*move)(char *to, char *from, size_t bytes, size_t *done_out); /* but for holes */
	/* moved: to where the program has moved the pages, for the event that is being served. */
	int (*copy)(char *to, const char *from, size_t bytes, bool moved, size_t *done_out);
	int (*poison)(char *page, bool moved);
	int (*zero)(char *page);
	void (*wake)(char *at, size_t bytes);
	/* The bytes are gone, the memory given back. is_watched: the range is registered. */
	int (*discard)(char *at, size_t bytes, bool is_watched);
	/* The slot of the cradle is empty, and its next page can be a huge one. */
	int (*renew)(char *slot);
	/* The page there is a part of a huge one; true, too, where the kernel does not tell. */
	bool (*is_huge)(const char *at);
	/* Of 2 MiB of ours without a page: the kernel's table of single pages is gone, too. */
	bool (*untable)(char *at);
	/* What is missing of this part of the shadow is zeros: who reads there faults no more. */
	void (*fill_holes)(char *at, size_t bytes);
	bool (*is_zeros)(const char *page); /* what is there */
	struct iswf_digest (*digest)(const char *page);
	int (*unmap)(char *at, size_t bytes);
	int (*advise)(char *at, size_t bytes, int advice);   /* of what is the kernel's */
	int (*leave)(char *at, size_t bytes, bool children); /* unregisters */
	int (*watch)(char *at, size_t bytes);                /* registers */
	/* Which pages of the block there the kernel has, in memory or in swap. */
	struct iswf_mask (*there)(const char *at);
	void (*pause)(uint64_t ns);
	uint64_t (*free_swap_pages)(void); /* of the host */
	/* One request to the device; `bytes` of a write, or where those of a read go. Waits. */
	int (*ask)(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
		   int (*take)(void *ctx, const char *from), void *ctx);
};

struct iswf_counts {
	atomic_uint_fast64_t pages_out, pages_in, pages_back, pages_filled, blocks_out, fetches,
		small_fetches, room_waits, room_wait_ns, fetch_wait_ns, refused_moves, no_room,
		pages_lost, faults, blocks_ahead, blocks_ahead_used, pauses, pause_ns,
		pages_away /* now: of far */, handed_back[ISWF_WHYS];
};

struct iswf_agent {
	const struct iswf_ops *ops;
	pthread_mutex_t lock;
	pthread_cond_t released; /* a block was */
	pthread_cond_t room;     /* memory became free */
	pthread_cond_t work;     /* there is something to evict, to send or to drop */
	char *arena, *shadow, *cradle;
	atomic_uint blocks_count; /* falls once, at the end: see iswf_retire() */
	uint32_t blocks_used;     /* what lies behind was never given to the program */
	struct iswf_block *blocks;
	struct iswf_digest *digests; /* of known pages: one for each page of the arena */
	struct iswf_queue queues[ISWF_QUEUES];
	uint32_t shadow_free[ISWF_SHADOW_SLOTS], shadow_free_count;
	uint32_t cradle_free[ISWF_CRADLE_SLOTS], cradle_free_count;
	uint32_t ready[ISWF_CRADLE_SLOTS], ready_count; /* slots of the cradle that hold zeros */
	uint32_t wishes[ISWF_AHEAD_MAX], wishes_count;  /* blocks to be brought ahead */
	uint32_t ahead_count;                           /* blocks brought ahead and not used yet */
	uint32_t whole_count;                           /* blocks that came whole */
	uint32_t fetch_count;                           /* fetches for faults */
	uint32_t turns_count;                           /* choices of victims of HOME or LOOPED */
	uint32_t left_count;                            /* blocks that have left; may wrap */
	uint32_t stays_count;   /* that a fault began and that might be bought at once */
	uint32_t late;          /* fetches of late that were late: see fault.c */
	uint32_t unused;        /* what of late nobody wanted of blocks that were bought by parts */
	int64_t held_pages;     /* of home and aside */
	int64_t budget_pages;   /* how many may be */
	uint64_t full_until_ns; /* the device had no room: no eviction until then */
	/* Likewise, for a pause: see pause.c. Its length; when it began; until when it is counted.
	 */
	uint64_t paused_until_ns, pause_ns, pause_began_ns, pause_counted_ns;
	uint64_t strays_since_ns;
	uint32_t strays;      /* fetches of single scattered pages */
	int32_t strays_net;   /* of them since strays_since_ns, less four times those in order */
	bool overfull;        /* since a pause more is home than may be: nobody waits for room */
	bool swap_is_limited; /* by a cgroup: how much of it is free is not known */
	atomic_uint others;   /* processes of the job with much far memory */
	bool scarce;          /* so little is left of the budget that the arena is to be watched */
	bool watching;        /* it is being registered */
	bool watched;         /* it is: see watch.c */
	bool resting;         /* nothing leaves and nothing is taken */
	bool ended;           /* and all is home */
	bool retired;         /* and iswf_retire() has begun to unmap the agent's ranges */
	bool tables_go;       /* the kernel gives up a table of pages with its last page */
	uint32_t parked;      /* threads that evict and have nothing to do */
	atomic_uint forks;    /* under way: likewise until they are done; seq_cst */
	struct iswf_counts count;
};

extern struct iswf_agent iswf_agent;

/* Nothing leaves and nothing is taken, now or for good. Lock held. */
static inline bool iswf_rests(void)
{
	return iswf_agent.resting || atomic_load(&iswf_agent.forks) != 0;
}

/* Lock held. */
static inline bool iswf_is_paused(uint64_t now)
{
	return now < iswf_agent.paused_until_ns;
}

/* No block leaves that would be sent. Lock held. */
static inline bool iswf_keeps_all(uint64_t now)
{
	return now < iswf_agent.full_until_ns || iswf_is_paused(now);
}

/* Threads that evict have nothing left to do: a sandbox may forbid what they do. Lock held. */
static inline bool iswf_has_ended(void)
{
	return iswf_agent.resting && iswf_agent.queues[ISWF_Q_DROP].count == 0;
}

/* ------------------------------------------------------------------- masks */

static inline bool iswf_has(const struct iswf_mask *mask, uint32_t page)
{
	return mask->word[page / 64] >> page % 64 & 1;
}
static inline void iswf_set(struct iswf_mask *mask, uint32_t page)
{
	mask->word[page / 64] |= 1ull << page % 64;
}
static inline void iswf_clear(struct iswf_mask *mask, uint32_t page)
{
	mask->word[page / 64] &= ~(1ull << page % 64);
}
uint32_t iswf_mask_count(const struct iswf_mask *mask);
bool iswf_mask_any(const struct iswf_mask *mask);
/* Pages [first, end). */
struct iswf_mask iswf_mask_range(uint32_t first, uint32_t end);
struct iswf_mask iswf_mask_and(const struct iswf_mask *a, const struct iswf_mask *b);
struct iswf_mask iswf_mask_without(const struct iswf_mask *a, const struct iswf_mask *b);
void iswf_mask_add(struct iswf_mask *mask, const struct iswf_mask *more);
void iswf_mask_take(struct iswf_mask *mask, const struct iswf_mask *less);
/* The first run of set pages from *first on: its length, 0 when there is none. */
uint32_t iswf_mask_run(const struct iswf_mask *mask, uint32_t *first);
/* All set pages are in [first, end), and both ends are set; empty when none is. */
void iswf_mask_hull(const struct iswf_mask *mask, uint32_t *first_out, uint32_t *end_out);

/* ---- handlers of blocks (fault.c, evict.c, give_back.c; what they share: blocks.h) */

static inline char *iswf_at(uint32_t block)
{
	return iswf_agent.arena + (uint64_t)block * ISWF_BLOCK_BYTES;
}
/* A fault at this address. A thread of ours. */
void iswf_fault(char *at);
/* Moves one more block aside, or one that was freed alone; false: none can be. A thread of ours. */
bool iswf_evict(bool freed_alone);
/* Sends the block that is aside longest; false: there is none. A thread of ours. */
bool iswf_send(void);
/*
 * Brings one block aside from the device before a fault, where blocks came whole one after the
 * other, if there is room for it without evicting anything. False: none. A thread of ours.
 */
bool iswf_ahead(void);
/* Makes a huge page of zeros before its first touch; false: there are enough. A thread of ours. */
bool iswf_make_ready(void);
/* Tells the device of one block that no longer needs a place; false: there is none. */
bool iswf_drop(void);
/* Begins to watch the arena, if little is left of the budget; false: not now. A thread of ours. */
bool iswf_watch(void);
/*
 * One step of the threads that evict: evicts ahead of need, through a delay aside, sends, reads
 * ahead, or drops a block. False: there is nothing to do now.
 */
bool iswf_work_once(void);
/* Pages [first, end) of the block. 0, or -errno: some could not be discarded. */
int iswf_discard(uint32_t block, uint32_t first, uint32_t end, enum iswf_fate fate);
/* Pages [first, end) of the block are the kernel's: whatever is there is no longer touched. */
void iswf_lose(uint32_t block, uint32_t first, uint32_t end);
/*
 * Blocks [first, end) come home, are unregistered and stay the kernel's. children: forked ones get
 * them. What is lost is poisoned. Not by a thread that serves events: it waits for these.
 */
void iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why);
/*
 * The kernel was told by somebody else to forget these addresses, or their mapping; or to move
 * them, to `to` (else NULL): there they are the kernel's from then on.
 */
void iswf_removed(char *from, char *end, bool unmapped, char *to);
void iswf_clocks_init(void); /* of the conditions, before any is waited for */
/* Lock held: at most so long, below a second. */
void iswf_wait(pthread_cond_t *cond, long ns);
/* Lock held: less is free than is kept free, so that nobody has to wait for room. */
bool iswf_is_tight(void);
/* Lock held: what was freed has not been taken again for long. */
bool iswf_is_stale(void);
/* So many pages may be used now, or after a while. */
void iswf_need(int64_t pages);

/* -------------------------------------------------------- allocations (arena.c) */

/* NULL: there is no room. It is zeros, but for ISWF_MALLOC. */
char *iswf_take(size_t bytes, size_t align, enum iswf_request request);
/* Discards one block that was freed long ago, of an arena that is not watched. False: there is
 * none. */
bool iswf_give_up_stale(void);
/* The size of the allocation that begins there, in pages; 0: none does. No lock. */
uint32_t iswf_size_of(const void *at);
uint32_t iswf_size_of_mapping(const void *at); /* the same, of one that was taken as a mapping */
void iswf_give(char *at);
/* In place: false when there is no room behind it. */
bool iswf_resize(char *at, size_t bytes);
/* Whole pages of the arena, whosever they are. 0 or -errno. */
int iswf_unmap(char *at, size_t bytes);
int iswf_advise(char *at, size_t bytes, int advice); /* MADV_DONTNEED or MADV_FREE */
/* Their blocks stay the kernel's: see iswf_hand_back(). */
void iswf_surrender(char *at, size_t bytes, enum iswf_why why);
/* The same, for something else that will be mapped there, or that takes the mapping away. */
void iswf_lay_over(char *at, size_t bytes, enum iswf_why why);
/* In a forked child, which has no agent: allocations there are none of ours. */
void iswf_disown(const char *at, size_t bytes);
/* Lock held: pages [first, end) of the arena belong to no allocation and are not given again. */
void iswf_withdraw(uint32_t first, uint32_t end);
/* Lock held, all is home: what belongs to no allocation is unmapped. */
void iswf_retire(void);
int iswf_arena_init(uint64_t pages);
void iswf_arena_close(void);

static inline bool iswf_is_ours(const void *at)
{
	const char *arena = iswf_agent.arena;

	return arena != NULL && (const char *)at >= arena &&
	       (const char *)at <
		       arena + (uint64_t)atomic_load(&iswf_agent.blocks_count) * ISWF_BLOCK_BYTES;
}

/* ------------------------------------------------------------- the rest */

extern const struct iswf_ops iswf_real_ops; /* memory.c; ask is link.c's, digest digest.c's */
struct iswf_digest iswf_digest(const char *page);
int iswf_digest_init(void);            /* 0 or -errno */
int iswf_memory_open(int device_fd);   /* the userfaultfd, or -errno */
int iswf_memory_init(uint32_t blocks); /* ranges, registered: all or none */
void iswf_memory_close(void);          /* the userfaultfd */
/* How many pages of the block there the kernel has in swap; 0, too, where it does not tell. */
uint32_t iswf_swapped_pages(const char *at);
/* Threads that read the kernel's messages and serve them; one of them always reads. messages.c */
#define ISWF_SERVE_THREADS 3u
void *iswf_serve_main(void *arg);
/* Until every event that was read is served. Not by a thread that serves, nor with the lock. */
void iswf_await_events(void);

/* link.c. Connects to the device; blocks_out: how many it lends. 0 or -errno. */
int iswf_link_open(int job_fd, int uffd, uint32_t *blocks_out);
void iswf_link_close(void);                           /* before its thread runs */
void iswf_link_refuse(int job_fd, enum iswf_off off); /* tells the device why there is none */
int iswf_link_ask(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
		  int (*take)(void *ctx, const char *from), void *ctx);
void *iswf_link_main(void *arg); /* connects again */
void iswf_link_tell(void);       /* the counts, to people */

/* pause.c, lock held: every few milliseconds. back_ns: when much had come back, last. */
void iswf_pause_look(uint64_t now, uint64_t back_ns);

/* budget.c. cgroup: a directory of either hierarchy. 0 or -errno. */
int iswf_budget_open(const char *cgroup);
void iswf_budget_close(void);
bool iswf_budget_look(void); /* at most every few milliseconds; false: not now */

/* surroundings.c. Whether an agent may be here, and how many blocks it may reserve. */
enum iswf_off iswf_look_around(uint32_t *blocks_max_out);

/* descriptors.c: ours have numbers that programs do not count on, and are spared. */
int iswf_own_fd(int fd); /* takes fd, which may be -1 with errno; -errno */
void iswf_close_own(int fd);
void iswf_inherit_fd(int fd);         /* as it is; children keep it */
void iswf_drop_own(void);             /* all but those */
int iswf_next_own(unsigned int from); /* the lowest of ours from there on, or -1 */
bool iswf_spares(int fd);

/* start.c */
enum iswf_phase { ISWF_OFF, ISWF_WANTED, ISWF_STARTING, ISWF_ON, ISWF_REFUSED };
extern atomic_int iswf_phase;
/* Called where the program itself calls an allocator: starts what is wanted. True: it is on. */
bool iswf_start(void);
/* Around a fork, in the thread that makes it. */
void iswf_before_fork(void);
void iswf_after_fork(void);
void iswf_in_child(void);
void iswf_leave_thread(void); /* the calling thread ends by pthread_exit() */
uint64_t iswf_now_ns(void);

/*
 * What a program's thread asks for, with its signals blocked; a thread of ours does it where the
 * caller's stack is in the arena (F7). why: of ISWF_HAND_BACK and ISWF_ALL_HOME.
 */
enum iswf_errand {
	ISWF_GIVE,
	ISWF_RESIZE, /* 1: done; 0: not in place */
	ISWF_UNMAP,
	ISWF_DISCARD_RANGE,
	ISWF_FREE_RANGE,
	ISWF_HAND_BACK,
	ISWF_LAY_OVER,
	ISWF_ALL_HOME
};
bool iswf_stands_in_arena(void); /* the calling thread's stack is there */
/* why: of the last three. What comes of it: else 0 or -errno. */
int iswf_do_errand(enum iswf_errand errand, char *at, size_t bytes, enum iswf_why why);
void *iswf_errand_main(void *arg);
/* Nothing of the process's memory leaves from now on, and what has left is home. */
void iswf_end(void);
/* Whether the calling process is the one that the agent is for: a child in its memory is not. */
bool iswf_is_owner(void);

#endif
