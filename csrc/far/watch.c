/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the arena begins to be watched. A page that is watched costs a message and a wake-up at its
 * first touch, and a discard another message. So as long as the limits leave much, the arena is the
 * kernel's, as all other memory is, and `home` says which pages were live since they were zeros:
 * they may be there. So may others of their huge page, as zeros. Once little is left it is
 * registered, and the kernel says which pages are there. Until a block was looked at it is
 * `unseen`.
 *
 * Of what the program does meanwhile by calls that are not seen, the agent hears nothing. Such
 * pages are home by the books and not there, which is what they are after a discard, too (F4).
 */
#include "far/blocks.h"

#define A (&iswf_agent)

static void be_home(struct iswf_block *b, struct iswf_mask more)
{
	iswf_mask_take(&more, &b->home);
	iswf_mask_take(&more, &b->hole);
	iswf_mask_add(&b->home, &more);
	iswf_held_more(iswf_mask_count(&more));
}

void iswf_may_be_home(struct iswf_block *b, const struct iswf_mask *pages)
{
	if (!A->watched && !b->left)
		be_home(b, iswf_mask_and(pages, &b->live));
}

void iswf_rest_may_be_home(struct iswf_block *b)
{
	if (!A->watched && !b->left && !b->fixed && !iswf_mask_any(&b->live))
		be_home(b, iswf_mask_range(0, ISWF_BLOCK_PAGES));
}

/* Lock held: neither the kernel's block nor a hole is in what was used. */
static bool is_one_range(void)
{
	for (uint32_t block = 0; block < A->blocks_used; block++)
		if (A->blocks[block].left || iswf_mask_any(&A->blocks[block].hole))
			return false;
	return true;
}

/* Lock held. */
static int watch_block(uint32_t block)
{
	struct iswf_mask ours = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	uint32_t run;
	int code = 0;

	iswf_mask_take(&ours, &A->blocks[block].hole);
	pthread_mutex_unlock(&A->lock);
	for (uint32_t first = 0; code == 0 && (run = iswf_mask_run(&ours, &first)) != 0;
	     first += run)
		code = A->ops->watch(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
				     (size_t)run * ISWF_PAGE_BYTES);
	pthread_mutex_lock(&A->lock);
	return code;
}

/* Lock held. The kernel refuses to register it: something else is mapped there, say. */
static void leave_to_kernel(uint32_t block)
{
	struct iswf_block *b = iswf_claim(block);

	pthread_mutex_unlock(&A->lock);
	(void)A->ops->leave(iswf_at(block), ISWF_BLOCK_BYTES, true); /* what of it was registered */
	pthread_mutex_lock(&A->lock);
	iswf_count(&A->count.handed_back[ISWF_WHY_FIXED], iswf_mask_count(&b->home));
	iswf_held_more(-(int64_t)iswf_mask_count(&b->home));
	b->home = iswf_mask_range(0, 0);
	b->fixed = b->left = true;
	iswf_release(block);
}

/* Lock held. */
static void watch_blocks(uint32_t used)
{
	uint32_t unused = A->blocks_count - used;
	int code = 0;

	for (uint32_t block = 0; block < used; block++) {
		if (!A->blocks[block].left && watch_block(block) != 0)
			leave_to_kernel(block);
	}
	pthread_mutex_unlock(&A->lock);
	code = unused == 0 ? 0 : A->ops->watch(iswf_at(used), (size_t)unused * ISWF_BLOCK_BYTES);
	pthread_mutex_lock(&A->lock);
	for (uint32_t block = used; code != 0 && block < A->blocks_used; block++)
		leave_to_kernel(block); /* taken meanwhile */
	if (code != 0)
		iswf_withdraw(A->blocks_used * ISWF_BLOCK_PAGES,
			      A->blocks_count * ISWF_BLOCK_PAGES);
}

/* Lock held. */
static void watch_arena(void)
{
	bool is_one = is_one_range();
	uint32_t used = A->blocks_used;
	int code = -1;

	if (is_one) {
		pthread_mutex_unlock(&A->lock);
		code = A->ops->watch(A->arena, (size_t)A->blocks_count * ISWF_BLOCK_BYTES);
		pthread_mutex_lock(&A->lock);
	}
	if (code != 0)
		watch_blocks(used);
}

/* Lock held: nobody has looked at them. */
static void be_unseen(uint32_t used)
{
	for (uint32_t block = 0; block < used; block++)
		A->blocks[block].unseen = !A->blocks[block].left;
}

/*
 * Lock held, watched: what the kernel has there is home, and nothing else. But of a discard that we
 * were told of the pages may be there still.
 */
static void look_at(uint32_t block)
{
	struct iswf_block *b = iswf_claim(block);
	int64_t more = -(int64_t)iswf_mask_count(&b->home);
	struct iswf_mask there;
	bool huge;

	pthread_mutex_unlock(&A->lock);
	there = A->ops->there(iswf_at(block));
	huge = A->ops->is_huge(iswf_at(block));
	pthread_mutex_lock(&A->lock);
	if (!b->left) {
		iswf_mask_take(&there, &b->hole);
		iswf_mask_take(&there, &b->aside);
		iswf_mask_take(&there, &b->far);
		b->home = b->unsure ? iswf_mask_and(&there, &b->home) : there;
		more += iswf_mask_count(&b->home);
		iswf_held_more(more);
	}
	b->unseen = false;
	if (iswf_mask_any(&b->home)) {
		b->tabled |= !huge;
		b->filled = huge && !b->looked && A->tables_go;
	}
	iswf_release(block);
}

bool iswf_watch(void)
{
	uint32_t used;

	pthread_mutex_lock(&A->lock);
	if (A->watched || A->watching || !A->scarce || iswf_rests()) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	A->watching = true;
	watch_arena();
	A->watched = true;
	A->watching = false;
	used = A->blocks_used;
	be_unseen(used);
	pthread_cond_broadcast(&A->released);
	for (uint32_t block = 0; block < used && !A->resting; block++)
		look_at(block);
	pthread_mutex_unlock(&A->lock);
	return true;
}
