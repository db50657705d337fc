// SPDX-License-Identifier: Apache-2.0
/*
 * A store in a directory is stopped dead before and after every step that changes a file, and in
 * the middle of zeroing; its successor is compared with what the dead one had promised. The steps
 * are the system calls themselves (the linker's --wrap, see CMakeLists.txt).
 */
#define _GNU_SOURCE 1
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/store.h"
#include "store_directory.h"

#define SLAB_BYTES   8192u
#define SLABS        4u
#define LEASES       3u
#define SLOTS        3u
#define OPERATIONS   100u
#define MAPPINGS_MAX 128u
#define STOPPED      42
#define SEEDS        8u

enum promise {
	NOTHING,
	BEGUN,    /* the call that makes it has not returned */
	KEPT,     /* it has */
	ENDING,   /* the call that ends it has not returned */
	GIVEN_UP, /* it has */
};

struct mapping {
	enum promise promise;
	uint64_t lease;
	uint32_t slot;
	uint32_t tag;
	uint64_t generation;
};

struct lease_promise {
	enum promise promise;
	uint64_t lease;
};

/* What the child has promised; shared with its parent, which outlives it. */
static struct model {
	uint32_t stop_at; /* counts down; 0: never */
	uint64_t generation_last;
	uint64_t lease_last;
	struct lease_promise leases[MAPPINGS_MAX];
	uint32_t lease_count;
	struct mapping mappings[MAPPINGS_MAX];
	uint32_t mapping_count;
} * model;

int __real_renameat(int from_fd, const char *from, int to_fd, const char *to);
int __real_unlinkat(int fd, const char *name, int flags);
int __real_ftruncate(int fd, off_t bytes);
void __real_iswi_slab_mem_zero(struct iswi_slab_mem *mem);
int __wrap_renameat(int from_fd, const char *from, int to_fd, const char *to);
int __wrap_unlinkat(int fd, const char *name, int flags);
int __wrap_ftruncate(int fd, off_t bytes);
void __wrap_iswi_slab_mem_zero(struct iswi_slab_mem *mem);

static void step(void)
{
	if (model->stop_at != 0 && --model->stop_at == 0)
		_exit(STOPPED);
}

static int stepped(int result)
{
	step();
	return result;
}

int __wrap_renameat(int from_fd, const char *from, int to_fd, const char *to)
{
	step();
	return stepped(__real_renameat(from_fd, from, to_fd, to));
}

int __wrap_unlinkat(int fd, const char *name, int flags)
{
	step();
	return stepped(__real_unlinkat(fd, name, flags));
}

int __wrap_ftruncate(int fd, off_t bytes)
{
	step();
	return stepped(__real_ftruncate(fd, bytes));
}

void __wrap_iswi_slab_mem_zero(struct iswi_slab_mem *mem)
{
	step();
	memset(mem->base, 0, mem->bytes / 2);
	step();
	__real_iswi_slab_mem_zero(mem);
	step();
}

static uint32_t draw(uint32_t *seed, uint32_t below)
{
	*seed = *seed * 1664525u + 1013904223u;
	return (*seed >> 8) % below;
}

static unsigned char pattern_of(uint64_t generation)
{
	return (unsigned char)(1 + generation % 255);
}

static struct iswi_slot *slot_of(uint64_t lease, uint32_t slot)
{
	struct iswi_lease *found = iswi_lease_find(store, lease);

	CHECK(found != NULL);
	return &found->slots[slot];
}

static void open_store(void)
{
	struct isw_error error;

	CHECK_OK(try_open_store(SLAB_BYTES, SLABS, &store, &error), error);
}

/* As the daemon does, whose own note of a lease goes before the lease does. */
static void restore_leases(void)
{
	for (uint32_t i = 0; i < model->lease_count; i++)
		if (model->leases[i].promise == KEPT)
			CHECK_EQ(isw_store_lease_restore(store, model->leases[i].lease, SLOTS, 1),
				 0);
}

/* ------------------------------------------------------- the one that is stopped */

static void make_lease(void)
{
	struct lease_promise *promise = &model->leases[model->lease_count];
	char ticket[ISW_TICKET_TEXT_BYTES];

	if (lease_create(store, SLOTS, ticket, &promise->lease, NULL) != 0)
		return;
	model->lease_last = promise->lease;
	promise->promise = KEPT;
	model->lease_count++;
}

static void end_lease(uint32_t number)
{
	struct lease_promise *promise = &model->leases[number];

	if (promise->promise != KEPT)
		return;
	promise->promise = ENDING;
	for (uint32_t i = 0; i < model->mapping_count; i++)
		if (model->mappings[i].lease == promise->lease &&
		    model->mappings[i].promise == KEPT)
			model->mappings[i].promise = ENDING;
	CHECK_EQ(isw_store_lease_destroy(store, promise->lease), 0);
	promise->promise = GIVEN_UP;
	for (uint32_t i = 0; i < model->mapping_count; i++)
		if (model->mappings[i].lease == promise->lease)
			model->mappings[i].promise = GIVEN_UP;
}

static void map_one(uint32_t number, uint32_t tag)
{
	struct mapping *mapping = &model->mappings[model->mapping_count];
	void *memory;

	if (model->leases[number].promise != KEPT || model->mapping_count == MAPPINGS_MAX)
		return;
	*mapping = (struct mapping){.lease = model->leases[number].lease, .tag = tag};
	mapping->promise = BEGUN;
	model->mapping_count++;
	if (isw_store_map(store, mapping->lease, tag, &mapping->slot, &mapping->generation) != 0) {
		model->mapping_count--;
		return;
	}
	CHECK(mapping->generation > model->generation_last);
	model->generation_last = mapping->generation;
	memory = slot_of(mapping->lease, mapping->slot)->memory;
	CHECK(all_bytes(memory, 0, SLAB_BYTES));
	memset(memory, pattern_of(mapping->generation), SLAB_BYTES);
	mapping->promise = KEPT;
}

static void unmap_one(uint32_t number, uint32_t wait_ms_max)
{
	struct mapping *mapping = &model->mappings[number];

	if (mapping->promise != KEPT)
		return;
	mapping->promise = ENDING;
	CHECK_EQ(isw_store_unmap(store, mapping->lease, mapping->slot, mapping->generation,
				 wait_ms_max),
		 0);
	mapping->promise = GIVEN_UP;
}

static void restart(void)
{
	isw_store_destroy(store);
	open_store();
	restore_leases();
	isw_store_restored(store);
}

static void live(uint32_t seed)
{
	open_store();
	isw_store_restored(store);
	make_lease();
	for (uint32_t i = 0; i < OPERATIONS; i++) {
		uint32_t one = draw(&seed, 64), lease = one % model->lease_count;

		switch (draw(&seed, 10)) {
		case 0:
			if (model->lease_count < LEASES * 2)
				make_lease();
			break;
		case 1:
			if (draw(&seed, 3) == 0)
				end_lease(lease);
			break;
		case 2:
		case 3:
			isw_store_preallocate(store, NULL);
			break;
		case 4:
		case 5:
			map_one(lease, one);
			break;
		case 6:
			if (model->mapping_count > 0)
				unmap_one(one % model->mapping_count, one % 2 * 1000);
			break;
		case 7:
			isw_store_scrub(store);
			break;
		case 8:
			if (draw(&seed, 2) == 0)
				isw_store_release_free(store);
			break;
		default:
			if (draw(&seed, 3) == 0)
				restart();
		}
	}
	isw_store_destroy(store);
}

/* --------------------------------------------------------------- the successor */

static const struct mapping *promised(uint64_t lease, const struct isw_slot_info *info)
{
	for (uint32_t i = 0; i < model->mapping_count; i++) {
		const struct mapping *mapping = &model->mappings[i];

		if (mapping->lease == lease && mapping->generation == info->generation &&
		    mapping->slot == info->slot && mapping->tag == info->tag)
			return mapping;
	}
	return NULL;
}

/* What is there was promised, or was just being promised; returns how many of the first. */
static uint32_t check_lease(uint64_t lease)
{
	struct isw_slot_info info;
	uint32_t kept = 0;

	for (uint32_t slot = 0; isw_store_lease_slot(store, lease, slot, &info) == 0;
	     slot = info.slot + 1) {
		const struct mapping *mapping = promised(lease, &info);
		const void *memory = slot_of(lease, info.slot)->memory;

		if (mapping == NULL || mapping->promise == BEGUN) {
			/* Its device was not told: it gives it back. */
			CHECK(info.generation > model->generation_last);
			CHECK(all_bytes(memory, 0, SLAB_BYTES));
			continue;
		}
		CHECK(mapping->promise == KEPT || mapping->promise == ENDING);
		CHECK(all_bytes(memory, pattern_of(info.generation), SLAB_BYTES));
		kept += mapping->promise == KEPT;
	}
	return kept;
}

static void check_slabs(void)
{
	for (uint32_t i = 0; i < store->slabs_size; i++)
		if (store->slabs[i].state == ISWI_SLAB_FREE)
			CHECK(all_bytes(store->slabs[i].mem.base, 0, SLAB_BYTES));
}

/* All that can be made new: every number is above every old one, every byte is zero. */
static void check_new(void)
{
	char ticket[ISW_TICKET_TEXT_BYTES];
	uint64_t lease, generation;
	uint32_t slot;

	scrub_all();
	while (isw_store_preallocate(store, NULL) == 0)
		;
	for (uint32_t i = 0; i < model->lease_count; i++)
		if (model->leases[i].promise == KEPT) {
			CHECK_EQ(isw_store_lease_destroy(store, model->leases[i].lease), 0);
			break;
		}
	if (lease_create(store, SLABS, ticket, &lease, NULL) != 0)
		return;
	CHECK(lease > model->lease_last);
	while (isw_store_map(store, lease, 0, &slot, &generation) == 0) {
		CHECK(generation > model->generation_last);
		CHECK(all_bytes(slot_of(lease, slot)->memory, 0, SLAB_BYTES));
	}
}

static void succeed(void)
{
	uint32_t kept = 0, wanted = 0;
	struct isw_error note;

	open_store();
	CHECK_EQ(isw_store_note(store, 0, &note), -ENOENT);
	restore_leases();
	isw_store_restored(store);
	for (uint32_t i = 0; i < model->lease_count; i++)
		if (model->leases[i].promise == KEPT)
			kept += check_lease(model->leases[i].lease);
	for (uint32_t i = 0; i < model->mapping_count; i++)
		wanted += model->mappings[i].promise == KEPT;
	CHECK_EQ(kept, wanted);
	check_slabs();
	check_new();
	isw_store_destroy(store);
}

/* false: it came to its end before that step. */
static bool stop_at(uint32_t seed, uint32_t at)
{
	int status;
	pid_t child;

	memset(model, 0, sizeof(*model));
	model->stop_at = at;
	fflush(NULL);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		live(seed);
		_exit(0);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status));
	CHECK(WEXITSTATUS(status) == STOPPED || WEXITSTATUS(status) == 0);
	model->stop_at = 0;
	succeed();
	empty_directory();
	return WEXITSTATUS(status) == STOPPED;
}

int main(int argc, char **argv)
{
	uint32_t first = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1, steps = 0;

	model = mmap(NULL, sizeof(*model), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		     0);
	CHECK(model != MAP_FAILED);
	directory_make();
	for (uint32_t seed = first; seed < first + SEEDS; seed++) {
		uint32_t at = 1;

		while (stop_at(seed, at))
			at++;
		steps += at;
	}
	rmdir(directory);
	fprintf(stderr, "stopped at %u steps\n", steps);
	return 0;
}
