/* SPDX-License-Identifier: Apache-2.0 */
/* Stores one after the other in one directory. */
#ifndef ISW_TEST_STORE_DIRECTORY_H
#define ISW_TEST_STORE_DIRECTORY_H

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#define OWN_MAIN
#include "store_fixture.h"

static char directory[] = "/dev/shm/isw-store-XXXXXX";

static void directory_make(void)
{
	if (mkdtemp(directory) == NULL)
		SKIP("no directory can be made in /dev/shm");
}

static int try_open_store(uint64_t slab_bytes, uint32_t slabs, isw_store **store_out,
			  struct isw_error *error)
{
	struct isw_store_config config = config_of(slab_bytes, slabs);

	config.slab_dir = directory;
	return isw_store_create(&config, store_out, error);
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

#endif
