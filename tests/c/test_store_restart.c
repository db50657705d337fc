// SPDX-License-Identifier: Apache-2.0
/* A store in a directory, and the one that comes after it: what is served again, and what is not.
 */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store_fixture.h"

#define SLAB_BYTES 65536u
#define SLABS      3u

static char directory[] = "/dev/shm/isw-store-restart-XXXXXX";

static int try_open_store(struct fixture *f, uint32_t slabs, struct isw_error *error)
{
	struct isw_store_config config = config_of(SLAB_BYTES, slabs);
	int err;

	config.slab_dir = directory;
	f->slab_bytes = SLAB_BYTES;
	err = isw_store_create(&config, &f->store, error);
	if (err == 0)
		CHECK_EQ(isw_store_listen(f->store, "127.0.0.1", 0, &f->port, NULL), 0);
	return err;
}

static void open_store(struct fixture *f)
{
	CHECK_EQ(try_open_store(f, SLABS, NULL), 0);
}

static void empty_directory(void)
{
	DIR *dir = opendir(directory);
	const struct dirent *entry;

	CHECK(dir != NULL);
	while ((entry = readdir(dir)) != NULL)
		if (entry->d_name[0] != '.' && unlinkat(dirfd(dir), entry->d_name, 0) != 0)
			CHECK_EQ(unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR), 0);
	closedir(dir);
}

/* The one file whose name has that in it. */
static void find(const char *part, char *path_out, size_t bytes)
{
	DIR *dir = opendir(directory);
	const struct dirent *entry;
	unsigned found = 0;

	CHECK(dir != NULL);
	while ((entry = readdir(dir)) != NULL) {
		if (strstr(entry->d_name, part) == NULL)
			continue;
		snprintf(path_out, bytes, "%s/%s", directory, entry->d_name);
		found++;
	}
	closedir(dir);
	CHECK_EQ(found, 1);
}

static void fill(const struct fixture *f, const char *token, uint32_t slot, int value)
{
	int fd = open_export(f->port, token);

	fill_bytes(fd, (uint64_t)slot * SLAB_BYTES, value, SLAB_BYTES);
	close(fd);
}

static void check_filled(const struct fixture *f, const char *token, uint32_t slot, int value)
{
	int fd = open_export(f->port, token);

	check_bytes(fd, (uint64_t)slot * SLAB_BYTES, value, SLAB_BYTES);
	close(fd);
}

/* A full pool, and a lease of it. */
static struct leased begin(struct fixture *f)
{
	open_store(f);
	while (isw_store_preallocate(f->store, NULL) == 0)
		;
	return lease_slots(f, 4);
}

/* By the next daemon, which knows of the lease. */
static void open_again(struct fixture *f, uint64_t lease, uint32_t slabs)
{
	CHECK_EQ(try_open_store(f, slabs, NULL), 0);
	CHECK_EQ(isw_store_lease_restore(f->store, lease, 4, 5), 0);
	isw_store_restored(f->store);
}

static void end(struct fixture *f)
{
	tear_down(f);
	empty_directory();
}

static void check_note(const struct fixture *f, const char *part)
{
	struct isw_error note;

	CHECK_EQ(isw_store_note(f->store, 0, &note), 0);
	if (strstr(note.text, part) == NULL) {
		fprintf(stderr, "%s\n", note.text);
		CHECK(strstr(note.text, part) != NULL);
	}
}

/* A lease comes back with its slabs where they were, but to its device alone. */
static void test_same_lease_again(void)
{
	struct fixture f;
	struct leased leased;
	struct isw_slot_info info;
	char token[ISW_TOKEN_TEXT_BYTES];
	struct mapped one, two;
	int fd;

	leased = begin(&f);
	isw_store_restored(f.store);
	one = map_slab(&f, leased.lease);
	CHECK_EQ(isw_store_map(f.store, leased.lease, 77, &two.slot, &two.generation), 0);
	fill(&f, leased.token, one.slot, 1);
	fill(&f, leased.token, two.slot, 2);
	CHECK_EQ(unmap_slab(&f, leased.lease, one, 1000), 0);
	tear_down(&f);

	open_store(&f);
	CHECK_EQ(stats_of(&f).slabs_free + stats_of(&f).slabs_dirty, SLABS);
	CHECK_EQ(isw_store_lease_restore(f.store, leased.lease, 4, 5), 0);
	CHECK_EQ(isw_store_lease_restore(f.store, leased.lease, 4, 5), -EEXIST);
	CHECK_EQ(isw_store_lease_restore(f.store, 1u << 30, 4, 5), -EINVAL);
	isw_store_restored(f.store);
	CHECK_EQ(stats_of(&f).slabs_mapped, 1);
	CHECK_EQ(stats_of(&f).slabs_dirty, 1);
	CHECK_EQ(stats_of(&f).slabs_free, 1);
	CHECK_EQ(isw_store_lease_slot(f.store, leased.lease, 0, &info), 0);
	CHECK_EQ(info.slot, two.slot);
	CHECK_EQ(info.generation, two.generation);
	CHECK_EQ(info.tag, 77);
	CHECK_EQ(isw_store_lease_slot(f.store, leased.lease, info.slot + 1, &info), -ENOENT);
	CHECK_EQ(lease_stats_of(&f, leased.lease).epoch, 5);
	/* Tokens are not kept. */
	fd = dial(f.port);
	CHECK(try_open(fd, leased.token) != 0);
	close(fd);
	CHECK_EQ(isw_store_lease_renew(f.store, leased.lease, 1000, token), 0);
	CHECK_EQ(lease_stats_of(&f, leased.lease).epoch, 6);
	check_filled(&f, token, two.slot, 2);
	/* A new slab is another generation, and zeroed. */
	one = map_slab(&f, leased.lease);
	CHECK(one.generation > two.generation);
	check_filled(&f, token, one.slot, 0);
	CHECK(lease_slots(&f, 1).lease > leased.lease);
	while (isw_store_pin(f.store) == 0)
		;
	end(&f);
}

/* Nobody has named the lease: its bytes are nobody's. */
static void test_lease_that_nobody_names(void)
{
	struct fixture f;
	struct leased leased, other;

	leased = begin(&f);
	for (uint32_t i = 0; i < SLABS; i++)
		fill(&f, leased.token, map_slab(&f, leased.lease).slot, 9);
	tear_down(&f);
	open_store(&f);
	isw_store_restored(f.store);
	CHECK_EQ(stats_of(&f).slabs_dirty, SLABS);
	while (isw_store_scrub(f.store) == 0)
		;
	other = lease_slots(&f, 4);
	for (uint32_t i = 0; i < SLABS; i++)
		check_filled(&f, other.token, map_slab(&f, other.lease).slot, 0);
	end(&f);
}

/* One directory, one store: even a second one of the same process is refused. */
static void test_directory_in_use(void)
{
	struct fixture f, second;
	struct isw_error error;

	open_store(&f);
	CHECK_EQ(try_open_store(&second, SLABS, &error), -EBUSY);
	CHECK(strstr(error.text, directory) != NULL);
	tear_down(&f);
	open_store(&f);
	end(&f);
}

/* A pool that was made smaller gives back what nobody has, and keeps what is lent. */
static void test_smaller_pool(void)
{
	struct fixture f;
	struct leased leased;

	leased = begin(&f);
	map_slab(&f, leased.lease);
	map_slab(&f, leased.lease);
	tear_down(&f);
	open_again(&f, leased.lease, 1);
	CHECK_EQ(stats_of(&f).slabs_mapped, 2);
	CHECK_EQ(stats_of(&f).slabs_free, 0);
	CHECK_EQ(isw_store_preallocate(f.store, NULL), -ENOSPC);
	end(&f);
}

/* What is done to the file of a lent slab while no daemon runs, and what is said about it. */
struct bad_file {
	void (*spoil)(const char *path);
	const char *name; /* else the name it gets */
	const char *why;
	uint32_t slabs_left;
};

static void with_bad_file(const struct bad_file *bad)
{
	struct isw_slot_info info;
	struct fixture f;
	struct leased leased;
	char path[512], other[512];

	leased = begin(&f);
	map_slab(&f, leased.lease);
	tear_down(&f);
	find(".mapped.", path, sizeof(path));
	snprintf(other, sizeof(other), "%s/%s", directory, bad->name == NULL ? "" : bad->name);
	if (bad->spoil != NULL)
		bad->spoil(path);
	else
		CHECK_EQ(rename(path, other), 0);
	open_store(&f);
	check_note(&f, bad->why);
	/* Where everything goes, no number of before counts. */
	CHECK_EQ(isw_store_lease_restore(f.store, leased.lease, 4, 1),
		 bad->slabs_left ? 0 : -EINVAL);
	isw_store_restored(f.store);
	CHECK_EQ(isw_store_lease_slot(f.store, leased.lease, 0, &info), -ENOENT);
	CHECK_EQ(stats_of(&f).slabs_mapped, 0);
	CHECK_EQ(stats_of(&f).slabs_free + stats_of(&f).slabs_dirty, bad->slabs_left);
	end(&f);
}

static void make_short(const char *path)
{
	CHECK_EQ(truncate(path, SLAB_BYTES - 4096), 0);
}

static void make_long(const char *path)
{
	CHECK_EQ(truncate(path, 2 * SLAB_BYTES), 0);
}

static void make_hole(const char *path)
{
	CHECK_EQ(truncate(path, 4096), 0);
	CHECK_EQ(truncate(path, SLAB_BYTES), 0);
}

static void make_link(const char *path)
{
	char other[512];

	snprintf(other, sizeof(other), "%s/slab.1000.free", directory);
	unlink(other);
	CHECK_EQ(rename(path, other), 0);
	CHECK_EQ(symlink("/dev/zero", path), 0);
}

static void give_away(const char *path)
{
	if (chown(path, 65534, 65534) != 0)
		make_short(path); /* not root: it is refused all the same, see the caller */
}

static void no_counter(const char *path)
{
	char counter[512];

	(void)path;
	find("next.", counter, sizeof(counter));
	CHECK_EQ(unlink(counter), 0);
}

static void second_counter(const char *path)
{
	int fd;
	char other[512];

	(void)path;
	snprintf(other, sizeof(other), "%s/next.77", directory);
	fd = open(other, O_CREAT | O_WRONLY, 0600);
	CHECK(fd >= 0);
	close(fd);
}

static void test_bad_files(void)
{
	const struct bad_file files[] = {
		{make_short, NULL, "size", SLABS - 1},
		{make_long, NULL, "size", SLABS - 1},
		{make_hole, NULL, "missing", SLABS - 1},
		{make_link, NULL, "opened", SLABS},
		{give_away, NULL, geteuid() == 0 ? "user" : "size", SLABS - 1},
		{NULL, "slab.7.mapped.1.0.5", "name", SLABS - 1},
		{NULL, "slab.1.mapped.01.0.5.0", "name", SLABS - 1},
		{NULL, "slab.1.mapped.1.0.99999.0", "number", SLABS - 1},
		{no_counter, NULL, "counter", 0},
		{second_counter, NULL, "counter", 0},
	};

	for (unsigned i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		with_bad_file(&files[i]);
}

/* Two files that claim one slot: neither is served. */
static void test_two_in_one_slot(void)
{
	struct isw_slot_info info;
	struct fixture f;
	struct leased leased;
	struct mapped mapped;
	char path[512], other[512];

	leased = begin(&f);
	mapped = map_slab(&f, leased.lease);
	map_slab(&f, leased.lease);
	tear_down(&f);
	snprintf(path, sizeof(path), ".mapped.%llu.%u.", (unsigned long long)leased.lease,
		 mapped.slot + 1);
	find(path, path, sizeof(path));
	snprintf(other, sizeof(other), "%s/slab.900.mapped.%llu.%u.901.0", directory,
		 (unsigned long long)leased.lease, mapped.slot);
	CHECK_EQ(rename(path, other), 0);
	open_again(&f, leased.lease, SLABS);
	CHECK_EQ(isw_store_lease_slot(f.store, leased.lease, 0, &info), -ENOENT);
	CHECK_EQ(stats_of(&f).slabs_dirty, 2);
	end(&f);
}

/* Something that cannot even be removed is a mistake for somebody to look at. */
static void test_what_cannot_be_removed(void)
{
	struct fixture f;
	struct isw_error error;
	char path[512];

	snprintf(path, sizeof(path), "%s/somebody", directory);
	CHECK_EQ(mkdir(path, 0700), 0);
	CHECK(try_open_store(&f, SLABS, &error) < 0);
	CHECK(strstr(error.text, "somebody") != NULL);
	empty_directory();
	open_store(&f);
	end(&f);
}

/* Its files go under the daemon: it serves on, and nothing survives it. */
static void test_files_removed_under_it(void)
{
	struct fixture f;
	struct leased leased;
	struct mapped mapped;

	leased = begin(&f);
	mapped = map_slab(&f, leased.lease);
	fill(&f, leased.token, mapped.slot, 3);
	empty_directory();
	check_filled(&f, leased.token, mapped.slot, 3);
	CHECK_EQ(unmap_slab(&f, leased.lease, mapped, 1000), 0);
	CHECK_EQ(isw_store_scrub(f.store), 0);
	mapped = map_slab(&f, leased.lease);
	check_filled(&f, leased.token, mapped.slot, 0);
	CHECK_EQ(isw_store_lease_destroy(f.store, leased.lease), 0);
	while (isw_store_release_free(f.store) == 0)
		;
	CHECK_EQ(stats_of(&f).slabs_free, 0);
	tear_down(&f);
	open_store(&f);
	CHECK_EQ(stats_of(&f).slabs_free, 0);
	end(&f);
}

static void test_no_directory(void)
{
	struct isw_store_config config = config_of(SLAB_BYTES, SLABS);
	struct isw_error error;
	isw_store *store;

	config.slab_dir = "/nonexistent/slabs";
	CHECK_EQ(isw_store_create(&config, &store, &error), -ENOENT);
	CHECK(strstr(error.text, "/nonexistent/slabs") != NULL);
}

int main(void)
{
	if (mkdtemp(directory) == NULL)
		SKIP("no directory can be made in /dev/shm");
	test_same_lease_again();
	test_lease_that_nobody_names();
	test_directory_in_use();
	test_smaller_pool();
	test_bad_files();
	test_two_in_one_slot();
	test_what_cannot_be_removed();
	test_files_removed_under_it();
	test_no_directory();
	CHECK_EQ(rmdir(directory), 0);
	return 0;
}
